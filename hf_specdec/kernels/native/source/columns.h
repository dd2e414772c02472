// Products of a few rows of tokens with weights whose outputs are contiguous: w [k, n], read in place.
#pragma once
#include "products.h"

namespace {

constexpr i64 INPUTS_AHEAD = 32;  // outputs of so many inputs later are fetched: they lie in other pages, which processors do not foresee

// total[t][v]: the sums for TOKENS tokens and VECTORS vectors of outputs, input by input whatever TOKENS and VECTORS are. FETCHES: what is
// read later is fetched; after the last input, what begins at `next`.
template <int TOKENS, int VECTORS, bool FETCHES, class E, class X>
inline void add_inputs(const E* w, i64 ldw, const E* next, const X* x, i64 ldx, i64 k, Floats (&total)[TOKENS][VECTORS]) {
  for (i64 i = 0; i < k; i++) {
    if constexpr (FETCHES) {
      const i64 later = i + INPUTS_AHEAD;
      const char* fetched = (const char*)(later < k ? w + later * ldw : next + (later - k) * ldw);
      UNROLLED for (int line = 0; line < VECTORS * LANES * (int)sizeof(E); line += 64) __builtin_prefetch(fetched + line, 0, FETCHED_TO);
    }
    Floats weights[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) weights[v] = load(w + i * ldw + v * LANES);
    UNROLLED for (int t = 0; t < TOKENS; t++) {
      const Floats own = splat(to_float(x[t * ldx + i]));
      UNROLLED for (int v = 0; v < VECTORS; v++) total[t][v] += weights[v] * own;
    }
  }
}

// Outputs n .. n + VECTORS * LANES of all tokens.
template <int TOKENS, int VECTORS, class E, class X> void columns_of(const Linear& call, const X* x, i64 ldx, i64 n, bool has_next) {
  const E *w = (const E*)call.w + n, *bias = (const E*)call.bias;
  const E* next = has_next ? w + VECTORS * LANES : w;
  for (i64 t = 0; t < call.rows; t += TOKENS) {
    const i64 first = smaller(t, larger(call.rows - TOKENS, 0));  // a few tokens are computed twice
    Floats total[TOKENS][VECTORS] = {};
    if (t == 0) add_inputs<TOKENS, VECTORS, true>(w, call.ldw, next, x, ldx, call.k, total);
    else add_inputs<TOKENS, VECTORS, false>(w, call.ldw, next, x + first * ldx, ldx, call.k, total);
    UNROLLED for (int i = 0; i < TOKENS; i++)
      UNROLLED for (int v = 0; v < VECTORS; v++) {
        if (bias) total[i][v] += load(bias + n + v * LANES);
        store((E*)call.y + (first + i) * call.ldy + n + v * LANES, total[i][v]);
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
  constexpr int most = sizeof(E) == 4 ? 16 : 8;  // numbers that are converted need registers
  const auto in_tiles = [&](auto tokens) {
    each(tokens, std::integral_constant<int, (MOST_SUMS / tokens < most ? MOST_SUMS / tokens : most)>());
    each(tokens, std::integral_constant<int, 1>());
  };
  if (call.rows == 1) in_tiles(std::integral_constant<int, 1>());
  else if (call.rows == 2) in_tiles(std::integral_constant<int, 2>());
  else if (call.rows == 3) in_tiles(std::integral_constant<int, 3>());
  else in_tiles(std::integral_constant<int, 4>());
  for (; n < last; n++)
    for (i64 t = 0; t < call.rows; t++) {
      float total = 0;
      for (i64 i = 0; i < call.k; i++) total += to_float(((const E*)call.w)[i * call.ldw + n]) * to_float(x[t * ldx + i]);
      store((E*)call.y + t * call.ldy + n, call.bias ? total + to_float(((const E*)call.bias)[n]) : total);
    }
}

}  // namespace
