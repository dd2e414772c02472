// The kernels, compiled once per instruction set; SET is its name.
#include "attention.h"
#include "elementwise.h"
#include "low_rank.h"
#include "quantized.h"

#define JOINED(A, B) A##B
#define NAMED(SET) JOINED(SET, _kernels)
#define TEXT(SET) #SET
#define TEXT_OF(SET) TEXT(SET)

const Kernels* NAMED(SET)() {
  static const Kernels kernels = {TEXT_OF(SET), linear, low_rank, dequantize, attention, elementwise};
  return &kernels;
}
