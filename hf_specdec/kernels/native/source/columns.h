// Products of a few rows of tokens with weights whose outputs are contiguous: w [k, n], read in place.
#pragma once
#include "products.h"

namespace {

constexpr i64 INPUTS_AHEAD = 32;  // outputs of so many inputs later are fetched: they lie in other pages, which processors do not foresee

// Outputs n .. n + VECTORS * LANES of all tokens, summed input by input, whatever TOKENS and VECTORS are. The first tokens fetch what all of
// them read: the next inputs' outputs, and after the last input those of the next tile.
template <int TOKENS, int VECTORS, class E, class X> void columns_of(const Linear& call, const X* x, i64 ldx, i64 n, bool has_next) {
  const E *w = (const E*)call.w + n, *bias = (const E*)call.bias;
  const E* next = has_next ? w + VECTORS * LANES : w;
  for (i64 t = 0; t < call.rows; t += TOKENS) {
    const i64 first = smaller(t, call.rows - TOKENS);  // a few tokens are computed twice
    Floats total[TOKENS][VECTORS] = {};
    for (i64 i = 0; i < call.k; i++) {
      if (TOKENS == 1 || t == 0) {
        const i64 later = i + INPUTS_AHEAD;
        const char* fetched = (const char*)(later < call.k ? w + later * call.ldw : next + (later - call.k) * call.ldw);
        UNROLLED for (int line = 0; line < VECTORS * LANES * (int)sizeof(E); line += 64) __builtin_prefetch(fetched + line, 0, FETCHED_TO);
      }
      Floats weights[VECTORS];
      UNROLLED for (int v = 0; v < VECTORS; v++) weights[v] = load(w + i * call.ldw + v * LANES);
      UNROLLED for (int j = 0; j < TOKENS; j++) {
        const Floats own = splat(to_float(x[(first + j) * ldx + i]));
        UNROLLED for (int v = 0; v < VECTORS; v++) total[j][v] += weights[v] * own;
      }
    }
    UNROLLED for (int j = 0; j < TOKENS; j++)
      UNROLLED for (int v = 0; v < VECTORS; v++) {
        if (bias) total[j][v] += load(bias + n + v * LANES);
        store((E*)call.y + (first + j) * call.ldy + n + v * LANES, total[j][v]);
      }
  }
}

// Outputs first .. last, in tiles of tokens and outputs whose sums fit the registers.
template <class E> void linear_by_columns(const Linear& call, i64 first, i64 last) {
  if (!call.rows) return;
  i64 ldx = call.ldx, n = first;
  const auto* x = met((const E*)call.x, call.rows, call.k, &ldx);
  const auto each = [&](auto tokens, auto vectors) {
    constexpr i64 width = vectors * LANES;
    for (; n + width <= last; n += width) columns_of<tokens, vectors, E>(call, x, ldx, n, n + 2 * width <= last);
  };
  constexpr int most = sizeof(E) == 4 ? 16 : LANES / 2;  // numbers that are converted need registers
  const auto in_tiles = [&](auto tokens) {
    each(tokens, std::integral_constant<int, (MOST_SUMS / tokens < most ? MOST_SUMS / tokens : most)>());
    each(tokens, std::integral_constant<int, 1>());
  };
  if (call.rows == 1) in_tiles(std::integral_constant<int, 1>());
  else if (call.rows < 4) in_tiles(std::integral_constant<int, 2>());
  else in_tiles(std::integral_constant<int, 4>());
  for (; n < last; n++)
    for (i64 t = 0; t < call.rows; t++) {
      float total = 0;
      for (i64 i = 0; i < call.k; i++) total += to_float(((const E*)call.w)[i * call.ldw + n]) * to_float(x[t * ldx + i]);
      store((E*)call.y + t * call.ldy + n, call.bias ? total + to_float(((const E*)call.bias)[n]) : total);
    }
}

}  // namespace
