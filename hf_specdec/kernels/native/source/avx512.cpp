// The kernels, compiled for avx512.
#include "kernels.inc"

const Kernels* avx512_kernels() {
  static const Kernels kernels = {"avx512", linear, dequantize, attention, elementwise};
  return &kernels;
}
