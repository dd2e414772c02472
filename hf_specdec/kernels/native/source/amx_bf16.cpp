// The kernels, compiled for avx512 and bf16, with AMX.
#include "kernels.inc"

const Kernels* amx_bf16_kernels() {
  static const Kernels kernels = {"amx_bf16", linear, dequantize, attention, elementwise};
  return &kernels;
}
