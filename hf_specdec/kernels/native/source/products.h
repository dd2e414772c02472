// Products of a few rows of tokens with row-major weights, read in place.
#pragma once
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST_TOKENS = 6;  // per tile: 4 x 6 sums in 32 registers
#else
constexpr int MOST_TOKENS = 3;
#endif

// The type in which tokens meet weights of type E.
template <class E> struct Met { typedef float type; };

// sums[t][j] = w[j] . x[t] for 4 rows of weights and COUNT tokens. Each sum has the same order whatever COUNT is.
template <int COUNT, class E>
inline void dots(const E* const w[4], const float* x, i64 ldx, i64 k, i64 ahead, float (*sums)[4]) {
  Floats total[COUNT][4] = {};
  i64 i = 0;
  for (; i + LANES <= k; i += LANES) {
    Floats weights[4];
    UNROLLED for (int j = 0; j < 4; j++) {
      weights[j] = load(w[j] + i);
      if (ahead) __builtin_prefetch(w[j] + i + ahead);
    }
    UNROLLED for (int t = 0; t < COUNT; t++) {
      Floats own = load(x + t * ldx + i);
      UNROLLED for (int j = 0; j < 4; j++) total[t][j] += weights[j] * own;
    }
  }
  UNROLLED for (int t = 0; t < COUNT; t++) {
    sums_of_four(total[t][0], total[t][1], total[t][2], total[t][3], sums[t]);
    for (i64 rest = i; rest < k; rest++)
      for (int j = 0; j < 4; j++) sums[t][j] += to_float(w[j][rest]) * x[t * ldx + rest];
  }
}

#if defined(__AVX512BF16__)
template <> struct Met<bf16> { typedef bf16 type; };

template <int COUNT>
inline void dots(const bf16* const w[4], const bf16* x, i64 ldx, i64 k, i64 ahead, float (*sums)[4]) {
  __m512 total[COUNT][4];
  UNROLLED for (int t = 0; t < COUNT; t++)
    UNROLLED for (int j = 0; j < 4; j++) total[t][j] = _mm512_setzero_ps();
  i64 i = 0;
  for (; i + 32 <= k; i += 32) {
    __m512bh weights[4];
    UNROLLED for (int j = 0; j < 4; j++) {
      weights[j] = (__m512bh)_mm512_loadu_si512(w[j] + i);
      if (ahead) __builtin_prefetch(w[j] + i + ahead);
    }
    UNROLLED for (int t = 0; t < COUNT; t++) {
      __m512bh own = (__m512bh)_mm512_loadu_si512(x + t * ldx + i);
      UNROLLED for (int j = 0; j < 4; j++) total[t][j] = _mm512_dpbf16_ps(total[t][j], weights[j], own);
    }
  }
  if (i < k) {
    __mmask32 inside = (1u << (k - i)) - 1;
    UNROLLED for (int t = 0; t < COUNT; t++) {
      __m512bh own = (__m512bh)_mm512_maskz_loadu_epi16(inside, x + t * ldx + i);
      UNROLLED for (int j = 0; j < 4; j++)
        total[t][j] = _mm512_dpbf16_ps(total[t][j], (__m512bh)_mm512_maskz_loadu_epi16(inside, w[j] + i), own);
    }
  }
  UNROLLED for (int t = 0; t < COUNT; t++)
    sums_of_four((Floats)total[t][0], (Floats)total[t][1], (Floats)total[t][2], (Floats)total[t][3], sums[t]);
}
#endif

// `dots` for a number of tokens known at run time, at most MOST_TOKENS.
template <class E, class X>
inline void dots(int count, const E* const w[4], const X* x, i64 ldx, i64 k, i64 ahead, float (*sums)[4]) {
  switch (count) {
    case 1: return dots<1>(w, x, ldx, k, ahead, sums);
    case 2: return dots<2>(w, x, ldx, k, ahead, sums);
    case 3: return dots<3>(w, x, ldx, k, ahead, sums);
#if defined(__AVX512F__)
    case 4: return dots<4>(w, x, ldx, k, ahead, sums);
    case 5: return dots<5>(w, x, ldx, k, ahead, sums);
    default: return dots<6>(w, x, ldx, k, ahead, sums);
#endif
  }
}

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
inline i64 larger(i64 a, i64 b) { return a > b ? a : b; }

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

template <class E> void linear_of(const Linear& call, i64 first, i64 last) {
  const E *weights = (const E*)call.w, *bias = (const E*)call.bias;
  i64 ldx = call.ldx;
  const auto* x = met((const E*)call.x, call.rows, call.k, &ldx);
  E* y = (E*)call.y;
  i64 tiles = (call.rows + MOST_TOKENS - 1) / MOST_TOKENS;
  for (i64 n = first; n < last; n += 4) {
    const E* w[4];
    for (int j = 0; j < 4; j++) w[j] = weights + smaller(n + j, last - 1) * call.ldw;
    i64 ahead = n + 8 <= last ? 4 * call.ldw : 0;  // the next rows of weights are fetched while these are read
    for (i64 tile = 0; tile < tiles; tile++) {
      i64 t = call.rows * tile / tiles, end = call.rows * (tile + 1) / tiles;
      float sums[MOST_TOKENS][4];
      dots((int)(end - t), w, x + t * ldx, ldx, call.k, tile ? 0 : ahead, sums);
      for (i64 i = t; i < end; i++) {
        float* own = sums[i - t];
        if (bias)
          for (int j = 0; j < 4 && n + j < last; j++) own[j] += to_float(bias[n + j]);
        if (n + 4 <= last) store_four(y + i * call.ldy + n, own);
        else
          for (i64 j = 0; j < last - n; j++) store(y + i * call.ldy + n + j, own[j]);
      }
    }
  }
}

void linear(const Linear& call, i64 first, i64 last) {
  switch (call.type) {
    case FLOAT32: return linear_of<float>(call, first, last);
    case BFLOAT16: return linear_of<bf16>(call, first, last);
    default: return linear_of<f16>(call, first, last);
  }
}

}  // namespace
