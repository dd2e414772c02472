// Products of a few rows of tokens with row-major weights, read in place.
#pragma once
#include <type_traits>
#include <utility>
#include "tiles.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST_SUMS = 24;  // in registers, beside a vector of each row of weights and one of a token
#else
constexpr int MOST_SUMS = 12;
#endif
constexpr int MOST_TOKENS = MOST_SUMS / 4;  // per tile of 4 rows of weights

// The type in which tokens meet weights of type E.
template <class E> struct Met { typedef float type; };

// The sums of vectors, in order; `sums` has room for a multiple of four. Constant indices keep the vectors in registers.
template <int COUNT, int ROWS, int... GROUP>
inline void sums_of(const Floats (&x)[COUNT][ROWS], float* sums, std::integer_sequence<int, GROUP...>) {
  constexpr int N = COUNT * ROWS;
#define VECTOR(i) x[(i) < N ? (i) / ROWS : 0][(i) < N ? (i) % ROWS : 0]
  (sums_of_four(VECTOR(4 * GROUP), VECTOR(4 * GROUP + 1), VECTOR(4 * GROUP + 2), VECTOR(4 * GROUP + 3), sums + 4 * GROUP), ...);
#undef VECTOR
}
template <int COUNT, int ROWS> inline void sums_of(const Floats (&x)[COUNT][ROWS], float* sums) {
  sums_of(x, sums, std::make_integer_sequence<int, (COUNT * ROWS + 3) / 4>());
}

// Part of k: numbers `from` to `to` of each row (`from` a multiple of 64). Sums that go on are in `kept`, [COUNT * ROWS].
struct Part {
  i64 from, to;
  bool is_last;
  Floats* kept;
};

// Rows of weights that are fetched from memory while others are read.
template <class E> struct Fetched {
  const E* first;
  i64 ldw;
};

// The cache that they are fetched to: 3 the first, 2 the second. On AMD's Zen 4 the first one waits for so few lines at a time that the
// products of 4 to 12 tokens take up to twice as long. Where that was not measured, the first.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr int FETCHED_TO = 2;
#else
constexpr int FETCHED_TO = 3;
#endif

// How numbers of weights E and tokens X meet: WIDTH of each at a time.
template <class E, class X> struct Meeting {
  static constexpr int WIDTH = LANES;
  typedef Floats Weights;
  typedef Floats Tokens;
  static Weights weights(const E* p) { return load(p); }
  static Tokens tokens(const X* p) { return load(p); }
  static Floats add(Floats total, Weights w, Tokens x) { return total + w * x; }
};

#if defined(__AVX512BF16__)
template <> struct Met<bf16> { typedef bf16 type; };

template <> struct Meeting<bf16, bf16> {
  static constexpr int WIDTH = 2 * LANES;
  typedef __m512bh Weights;
  typedef __m512bh Tokens;
  static __m512bh weights(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh tokens(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh first_of(const bf16* p, __mmask32 inside) { return (__m512bh)_mm512_maskz_loadu_epi16(inside, p); }
  static Floats add(Floats total, __m512bh w, __m512bh x) { return (Floats)_mm512_dpbf16_ps((__m512)total, w, x); }
};
#endif

// sums[t * ROWS + r] = w[r] . x[t] for COUNT tokens, while FETCHES other rows are fetched. Each sum has the same order whatever ROWS,
// COUNT and the parts are.
template <int ROWS, int COUNT, int FETCHES, class E, class X>
inline void dots(const E* const* w, const X* x, i64 ldx, Part part, Fetched<E> next, float* sums) {
  typedef Meeting<E, X> M;
  Floats total[COUNT][ROWS] = {};
  i64 i = part.from;
  if (i)
    UNROLLED for (int t = 0; t < COUNT; t++)
      UNROLLED for (int r = 0; r < ROWS; r++) total[t][r] = part.kept[t * ROWS + r];
  for (; i + M::WIDTH <= part.to; i += M::WIDTH) {
    typename M::Weights weights[ROWS];
    UNROLLED for (int r = 0; r < ROWS; r++) weights[r] = M::weights(w[r] + i);
    UNROLLED for (int r = 0; r < FETCHES; r++) __builtin_prefetch(next.first + r * next.ldw + i, 0, FETCHED_TO);
    UNROLLED for (int t = 0; t < COUNT; t++) {
      typename M::Tokens own = M::tokens(x + t * ldx + i);
      UNROLLED for (int r = 0; r < ROWS; r++) total[t][r] = M::add(total[t][r], weights[r], own);
    }
  }
  if (!part.is_last) {
    UNROLLED for (int t = 0; t < COUNT; t++)
      UNROLLED for (int r = 0; r < ROWS; r++) part.kept[t * ROWS + r] = total[t][r];
    return;
  }
  if constexpr (M::WIDTH != LANES) {
    if (i < part.to) {
      const auto inside = (1u << (part.to - i)) - 1;
      UNROLLED for (int t = 0; t < COUNT; t++) {
        const auto own = M::first_of(x + t * ldx + i, inside);
        UNROLLED for (int r = 0; r < ROWS; r++) total[t][r] = M::add(total[t][r], M::first_of(w[r] + i, inside), own);
      }
    }
    i = part.to;
  }
  if constexpr (ROWS == 4) {
    UNROLLED for (int t = 0; t < COUNT; t++) sums_of_four(total[t][0], total[t][1], total[t][2], total[t][3], sums + 4 * t);
  } else {
    sums_of(total, sums);
  }
  for (int t = 0; i < part.to && t < COUNT; t++)
    for (int r = 0; r < ROWS; r++)
      for (i64 rest = i; rest < part.to; rest++) sums[t * ROWS + r] += to_float(w[r][rest]) * to_float(x[t * ldx + rest]);
}

// With one tile of tokens, ROWS rows are fetched. With several, which have three tokens or more with AVX-512, each tile of 4 rows fetches two
// or one; smaller tiles fetch some rows twice.
template <int ROWS, int COUNT, class E, class X>
inline void dots_of(const E* const* w, const X* x, i64 ldx, Part part, int fetches, Fetched<E> next, float* sums) {
  if (fetches == 0) return dots<ROWS, COUNT, 0>(w, x, ldx, part, next, sums);
  if constexpr (ROWS == 4 && COUNT >= 3) {
    if (fetches == 1) return dots<ROWS, COUNT, 1>(w, x, ldx, part, next, sums);
    if (fetches == 2) return dots<ROWS, COUNT, 2>(w, x, ldx, part, next, sums);
  }
  dots<ROWS, COUNT, ROWS>(w, x, ldx, part, next, sums);
}

// `dots` for a number of tokens known at run time, at most MOST_SUMS / ROWS and 12.
template <int ROWS, class E, class X>
inline void dots(int count, const E* const* w, const X* x, i64 ldx, Part part, int fetches, Fetched<E> next, float* sums) {
  constexpr int MOST = MOST_SUMS / ROWS < 12 ? MOST_SUMS / ROWS : 12;
#define CASE(COUNT) case COUNT: if constexpr (COUNT <= MOST) dots_of<ROWS, COUNT>(w, x, ldx, part, fetches, next, sums); return;
  switch (count) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
#undef CASE
}

// Tokens [rows, k] as `dots` reads them: in place, or converted to floats.
inline const float* met(const float* x, i64, i64, i64* ) { return x; }
#if defined(__AVX512BF16__)
inline const bf16* met(const bf16* x, i64, i64, i64*) { return x; }
inline const float* met(const f16* x, i64 rows, i64 k, i64* ldx) {
#else
template <class E> inline const float* met(const E* x, i64 rows, i64 k, i64* ldx) {
#endif
  float* converted = (float*)scratch(0, rows * k * 4);
  for (i64 t = 0; t < rows; t++) {
    i64 i = 0;
    for (; i + LANES <= k; i += LANES) store(converted + t * k + i, load(x + t * *ldx + i));
    for (; i < k; i++) converted[t * k + i] = to_float(x[t * *ldx + i]);
  }
  *ldx = k;
  return converted;
}

constexpr i64 TOKEN_BYTES = 24 << 10, PART_BYTES = 16 << 10;  // of tokens that stay in the nearest cache beside the weights
constexpr i64 PANEL = 8, MOST_KEPT = 10;  // rows of weights whose sums wait for the next part of k, and for how many tokens

// Numbers of each row in a part of k: a multiple of 64, or all. Fewer or more tokens are faster in one part; measured.
inline i64 part_of(i64 rows, i64 k, i64 bytes) {
  if (bytes > 2 || rows < 6 || rows > MOST_KEPT || rows * k * bytes <= TOKEN_BYTES) return k;
  i64 parts = (rows * k * bytes + PART_BYTES - 1) / PART_BYTES;
  return (k / parts + 63) / 64 * 64;
}

// Outputs first .. last, ROWS rows of weights at a time, in tiles of tokens whose sums fit the registers.
template <int ROWS, class E, class X>
void linear_by(const Linear& call, const X* x, i64 ldx, i64 first, i64 last) {
  const E *weights = (const E*)call.w, *bias = (const E*)call.bias;
  E* y = (E*)call.y;
  const i64 most = smaller(MOST_SUMS / ROWS, 12), tiles = (call.rows + most - 1) / most;
  const i64 size = part_of(call.rows, call.k, sizeof(X)), panel = size == call.k ? last - first : PANEL;
  Floats kept[PANEL * MOST_KEPT];
  for (i64 from = first; from < last; from += panel) {
    const i64 end_of_panel = smaller(from + panel, last);
    for (i64 begin = 0; begin < call.k; begin += size) {
      Part part = {begin, smaller(begin + size, call.k), begin + size >= call.k, kept};
      for (i64 n = from; n < end_of_panel; n += ROWS) {
        const E* w[ROWS];
        for (int r = 0; r < ROWS; r++) w[r] = weights + smaller(n + r, last - 1) * call.ldw;
        // What is read four rows of weights later: in this panel, or its next part, or the next panel's first part.
        i64 ahead = n + ROWS + 4 <= end_of_panel ? 4 * call.ldw : !part.is_last ? size - (panel - 4) * call.ldw
                  : n + ROWS + 4 <= last ? 4 * call.ldw - begin : 0;
        for (i64 tile = 0; tile < tiles; tile++) {
          i64 t = call.rows * tile / tiles, end = call.rows * (tile + 1) / tiles;
          float sums[MOST_SUMS];
          part.kept = kept + (n - from) * call.rows + t * ROWS;
          // It is fetched by all tiles: one of them alone would wait for memory.
          const i64 row = ROWS * tile / tiles, fetches = ahead ? ROWS * (tile + 1) / tiles - row : 0;
          dots<ROWS>((int)(end - t), w, x + t * ldx, ldx, part, (int)fetches, Fetched<E>{w[0] + ahead + row * call.ldw, call.ldw}, sums);
          if (!part.is_last) continue;
          for (i64 i = t; i < end; i++) {
            float* own = sums + (i - t) * ROWS;
            if (bias)
              for (int r = 0; r < ROWS && n + r < last; r++) own[r] += to_float(bias[n + r]);
            if (ROWS == 4 && n + 4 <= last) store_four(y + i * call.ldy + n, own);
            else
              for (i64 r = 0; r < ROWS && n + r < last; r++) store(y + i * call.ldy + n + r, own[r]);
          }
        }
      }
    }
  }
}

// From memory, few rows of weights at a time are read fastest; from a cache, or where they have to be converted, four rows make
// the most of what is loaded. The bounds are measured.
template <class E> void linear_of(const Linear& call, i64 first, i64 last) {
  if (!call.rows) return;
  i64 ldx = call.ldx;
  const auto* x = met((const E*)call.x, call.rows, call.k, &ldx);
  const i64 rows = call.rows, most = sizeof(*x) == 2 ? 5 : 4;
  const bool streams = call.streams && sizeof(E) == sizeof(*x);
  if (streams && rows <= most) linear_by<1, E>(call, x, ldx, first, last);
  else if (streams && sizeof(*x) == 2 && rows > 6 && rows <= 10) linear_by<2, E>(call, x, ldx, first, last);
  else linear_by<4, E>(call, x, ldx, first, last);
}

void plain_linear(const Linear& call, i64 first, i64 last) {
  by_type(call.type, [&](auto e) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<decltype(e), bf16>) return linear_in_tiles(call, first, last); else
#endif
    linear_of<decltype(e)>(call, first, last);
  });
}

}  // namespace
