// The kernels, compiled for baseline.
#include "kernels.inc"

const Kernels* baseline_kernels() {
  static const Kernels kernels = {"baseline", linear, attention, elementwise};
  return &kernels;
}
