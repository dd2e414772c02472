// The kernels, compiled for avx2.
#include "kernels.inc"

const Kernels* avx2_kernels() {
  static const Kernels kernels = {"avx2", linear, dequantize, attention, elementwise};
  return &kernels;
}
