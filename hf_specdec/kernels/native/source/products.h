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

// The cache that weights are fetched to from memory: 3 the first, 2 the second. On AMD's Zen 4 the first one waits for so few lines at a time
// that the products of 4 to 12 tokens take up to twice as long. Where that was not measured, the first.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr int FETCHED_TO = 2;
#else
constexpr int FETCHED_TO = 3;
#endif

// Rows of weights that are fetched while others are read.
template <class E, int CACHE = FETCHED_TO> struct Fetched {
  const E* first;
  i64 ldw;
};

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

// Sums of products of rows of which this is a part: whether earlier parts were added up, and whether later ones will be; k is then a
// multiple of the vectors' width.
struct Part {
  Floats* kept;
  bool continues, ends;
};

// sums[t * lds + r] = w[r] . x[t] for COUNT tokens, while FETCHES other rows are fetched. Each sum has the same order whatever ROWS and
// COUNT are.
template <int ROWS, int COUNT, int FETCHES, int CACHE, class E, class X>
inline void dots(const E* const* w, const X* x, i64 ldx, i64 k, Fetched<E, CACHE> next, float* sums, i64 lds, Part part = {}) {
  typedef Meeting<E, X> M;
  Floats total[COUNT][ROWS] = {};
  if (part.continues)
    UNROLLED for (int t = 0; t < COUNT; t++)
      UNROLLED for (int r = 0; r < ROWS; r++) total[t][r] = part.kept[t * ROWS + r];
  i64 i = 0;
  for (; i + M::WIDTH <= k; i += M::WIDTH) {
    typename M::Weights weights[ROWS];
    UNROLLED for (int r = 0; r < ROWS; r++) weights[r] = M::weights(w[r] + i);
    UNROLLED for (int r = 0; r < FETCHES; r++) __builtin_prefetch(next.first + r * next.ldw + i, 0, CACHE);
    UNROLLED for (int t = 0; t < COUNT; t++) {
      typename M::Tokens own = M::tokens(x + t * ldx + i);
      UNROLLED for (int r = 0; r < ROWS; r++) total[t][r] = M::add(total[t][r], weights[r], own);
    }
  }
  if (part.ends) {
    UNROLLED for (int t = 0; t < COUNT; t++)
      UNROLLED for (int r = 0; r < ROWS; r++) part.kept[t * ROWS + r] = total[t][r];
    return;
  }
  if constexpr (M::WIDTH != LANES) {
    if (i < k) {
      const auto inside = (1u << (k - i)) - 1;
      UNROLLED for (int t = 0; t < COUNT; t++) {
        const auto own = M::first_of(x + t * ldx + i, inside);
        UNROLLED for (int r = 0; r < ROWS; r++) total[t][r] = M::add(total[t][r], M::first_of(w[r] + i, inside), own);
      }
    }
    i = k;
  }
  if constexpr (ROWS == 4) {
    UNROLLED for (int t = 0; t < COUNT; t++) sums_of_four(total[t][0], total[t][1], total[t][2], total[t][3], sums + t * lds);
  } else {
    sums_of(total, sums);
  }
  for (int t = 0; i < k && t < COUNT; t++)
    for (int r = 0; r < ROWS; r++)
      for (i64 rest = i; rest < k; rest++) sums[t * lds + r] += to_float(w[r][rest]) * to_float(x[t * ldx + rest]);
}

constexpr int MOST_AT_ONCE = 5;  // tokens that meet weights row by row

// `dots` for a number of tokens, and of rows to fetch (0, ROWS, or of four rows also 1 and 2, which are tiles that share the fetching, so that
// none is less than half full), known at run time. Not inlined, 4 and 5 tokens that meet weights row by row take 1.3 times as long.
template <int ROWS, class E, class X>
[[gnu::always_inline]] inline void dots(i64 count, i64 fetches, const E* const* w, const X* x, i64 ldx, i64 k, Fetched<E> next, float* sums) {
#define CASE(COUNT) \
  case COUNT: \
    if constexpr (COUNT <= (ROWS == 1 ? MOST_AT_ONCE : MOST_TOKENS)) { \
      if (fetches == 0) return dots<ROWS, COUNT, 0>(w, x, ldx, k, next, sums, ROWS); \
      if constexpr (ROWS == 4 && 2 * COUNT >= MOST_TOKENS) { \
        if (fetches == 1) return dots<ROWS, COUNT, 1>(w, x, ldx, k, next, sums, ROWS); \
        if (fetches == 2) return dots<ROWS, COUNT, 2>(w, x, ldx, k, next, sums, ROWS); \
      } \
      dots<ROWS, COUNT, ROWS>(w, x, ldx, k, next, sums, ROWS); \
    } \
    return;
  switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

// Tokens or weights [rows, k] as `dots` reads tokens: in place, or converted to floats in memory `which`.
inline const float* met(const float* x, i64, i64, i64*, i64 = 0) { return x; }
#if defined(__AVX512BF16__)
inline const bf16* met(const bf16* x, i64, i64, i64*, i64 = 0) { return x; }
inline const float* met(const f16* x, i64 rows, i64 k, i64* ldx, i64 which = 0) {
#else
template <class E> inline const float* met(const E* x, i64 rows, i64 k, i64* ldx, i64 which = 0) {
#endif
  float* converted = (float*)scratch(which, rows * k * 4);
  for (i64 t = 0; t < rows; t++) {
    i64 i = 0;
    for (; i + LANES <= k; i += LANES) store(converted + t * k + i, load(x + t * *ldx + i));
    for (; i < k; i++) converted[t * k + i] = to_float(x[t * *ldx + i]);
  }
  *ldx = k;
  return converted;
}

// Outputs first .. last, ROWS rows of weights at a time, in tiles of tokens whose sums fit the registers.
template <int ROWS, class E, class X>
void linear_by(const Linear& call, const X* x, i64 ldx, i64 first, i64 last) {
  const E *weights = (const E*)call.w, *bias = (const E*)call.bias;
  E* y = (E*)call.y;
  const i64 most = ROWS == 1 ? MOST_AT_ONCE : MOST_TOKENS, tiles = (call.rows + most - 1) / most;
  for (i64 n = first; n < last; n += ROWS) {
    const E* w[ROWS];
    for (int r = 0; r < ROWS; r++) w[r] = weights + smaller(n + r, last - 1) * call.ldw;
    for (i64 tile = 0; tile < tiles; tile++) {
      const i64 t = call.rows * tile / tiles, end = call.rows * (tile + 1) / tiles;
      // What is read four rows later is fetched by all tiles: one of them alone would wait for memory.
      const i64 row = ROWS * tile / tiles, fetches = n + ROWS + 4 <= last ? ROWS * (tile + 1) / tiles - row : 0;
      float sums[MOST_SUMS];
      dots<ROWS>(end - t, fetches, w, x + t * ldx, ldx, call.k, Fetched<E>{w[0] + (4 + row) * call.ldw, call.ldw}, sums);
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

// Of weights of a block of outputs, which stay in the second cache, and of a row that meets others at once, so that tiles of tokens and rows
// of weights stay in the first one. Measured on Zen 5.
constexpr i64 BLOCK_BYTES = 512 << 10, MOST_OUTPUTS = 128, PART_BYTES = 4 << 10;

// The sums of a tile of tokens with rows of weights i .. i + 4 of a block, over k numbers of each; the next four rows are fetched.
template <int TOKENS, class X>
inline void block_dots(const X* weights, i64 ldw, i64 rows, i64 i, const X* x, i64 ldx, i64 k, float* sums, Part part) {
  const X* w[4];
  for (int r = 0; r < 4; r++) w[r] = weights + smaller(i + r, rows - 1) * ldw;
  dots<4, TOKENS, 4>(w, x, ldx, k, Fetched<X, 3>{w[0] + 4 * ldw, ldw}, sums + i, MOST_OUTPUTS, part);
}

// The same for many tokens: all of them meet a block of weights before the next one.
template <class E, class X> void linear_in_blocks(const Linear& call, const X* x, i64 ldx, i64 first, i64 last) {
  constexpr i64 WIDTH = Meeting<X, X>::WIDTH, LINE = 64 / sizeof(X), BYTES = sizeof(X);
  const i64 most = smaller(MOST_OUTPUTS, larger(LANES, BLOCK_BYTES / (call.k * BYTES) / LANES * LANES));
  const i64 tiles = (call.rows + MOST_TOKENS - 1) / MOST_TOKENS, lines = (call.k + LINE - 1) / LINE;
  const i64 parts = (call.k * BYTES + PART_BYTES - 1) / PART_BYTES, length = larger(1, call.k / parts / WIDTH) * WIDTH;
  const E* bias = (const E*)call.bias;
  Floats* kept = (Floats*)scratch(2, MOST_OUTPUTS * MOST_TOKENS * sizeof(Floats));
  float sums[MOST_TOKENS][MOST_OUTPUTS];
  for (i64 n = first, count; n < last; n += count) {
    count = smaller(most, last - n);
    i64 ldw = call.ldw, line = 0;
    const X* weights = met((const E*)call.w + n * ldw, count, call.k, &ldw, 1);
    const X* next = weights + count * ldw;  // of the next block, which all tiles fetch
    i64 wanted = std::is_same_v<E, X> ? smaller(most, last - n - count) * lines : 0;
    const i64 some = wanted / (tiles * parts * count / 4) + 1;
    for (i64 tile = 0; tile < tiles; tile++) {
      const i64 t = call.rows * tile / tiles, end = call.rows * (tile + 1) / tiles;
      for (i64 k = 0; k < call.k; k += length)
        for (i64 i = 0; i < count; i += 4) {
          const Part part = {kept + i * MOST_TOKENS, k > 0, k + length < call.k};
          for (i64 j = smaller(some, wanted); j; j--, wanted--) {
            __builtin_prefetch(next + line * LINE, 0, FETCHED_TO);
            if (++line == lines) line = 0, next += ldw;
          }
          const i64 size = smaller(length, call.k - k);
          if (end - t == MOST_TOKENS) block_dots<MOST_TOKENS>(weights + k, ldw, count, i, x + t * ldx + k, ldx, size, sums[0], part);
          else block_dots<MOST_TOKENS - 1>(weights + k, ldw, count, i, x + t * ldx + k, ldx, size, sums[0], part);
        }
      for (i64 j = t; j < end; j++) {
        E* y = (E*)call.y + j * call.ldy + n;
        const float* own = sums[j - t];
        i64 i = 0;
        for (; i + LANES <= count; i += LANES) store(y + i, bias ? load(own + i) + load(bias + n + i) : load(own + i));
        for (; i < count; i++) store(y + i, bias ? own[i] + to_float(bias[n + i]) : own[i]);
      }
    }
  }
}

constexpr i64 TOKEN_BYTES = 24 << 10;  // of tokens that stay in the nearest cache beside the weights

// Four rows of weights at a time make the most of what is loaded. From memory, numbers that need no conversion are read up to 1.3 times as
// fast row by row, as long as the tokens stay in the nearest cache. Measured on Zen 4.
template <class E> void linear_of(const Linear& call, i64 first, i64 last) {
  if (!call.rows) return;
  i64 ldx = call.ldx;
  const auto* x = met((const E*)call.x, call.rows, call.k, &ldx);
  if constexpr (sizeof(*x) == 2)
    if (call.streams && call.rows <= MOST_AT_ONCE && call.rows * call.k * 2 <= TOKEN_BYTES)
      return linear_by<1, E>(call, x, ldx, first, last);
  // Blocks cost floats more, and conversions of weights. Measured on Zen 5.
  const bool few_floats = call.rows < 128 || (sizeof(E) == 4 && call.rows * call.k * 4 <= BLOCK_BYTES);
  if (sizeof(*x) == 2 ? call.rows >= 48 : !few_floats) return linear_in_blocks<E>(call, x, ldx, first, last);
  linear_by<4, E>(call, x, ldx, first, last);
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
