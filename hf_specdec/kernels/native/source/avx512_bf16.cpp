// The kernels, compiled for avx512 and bf16.
#include "kernels.inc"

const Kernels* avx512_bf16_kernels() {
  static const Kernels kernels = {"avx512_bf16", linear, dequantize, attention, elementwise};
  return &kernels;
}
