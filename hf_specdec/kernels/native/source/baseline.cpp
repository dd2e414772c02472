// The kernels, compiled for baseline.
#include "kernels.inc"

const Kernels* baseline_kernels() {
  static const Kernels kernels = {"baseline", linear, dequantize, attention, elementwise};
  return &kernels;
}
