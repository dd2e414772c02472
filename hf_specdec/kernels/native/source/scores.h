// Scores of queries and keys that lie at slots of a pool.
#pragma once
#include "products.h"

namespace {

// Keys and values lie apart, which processors do not foresee: memory is asked for so many of them ahead. Measured for 8 to 64.
template <class E> constexpr i64 KEYS_AHEAD = sizeof(E) > 1 ? 32 : 64;

// Bring what is at slots [first, last) into the second cache. Compilers drop calls that only do that, unless they are inline.
template <class E> [[gnu::always_inline]] inline void ask_for(const E* from, i64 pitch, const i64* slots, i64 first, i64 last, i64 width) {
  for (i64 j = first; j < last; j++)
    for (i64 d = 0; d < width; d += 64 / sizeof(E)) __builtin_prefetch(from + slots[j] * pitch + d, 0, 2);
}

#if defined(__AVX512F__)
// Scores of 16 keys at a time. Words of keys (a number, or two of bfloat16) are packed as [words][16 keys], where each meets the same word of a
// query. Even and odd words have sums of their own.
constexpr int MOST_SCORED = 6;  // queries at a time
template <class X> constexpr i64 PER_WORD = 4 / sizeof(X);
template <class X> constexpr i64 PER_VECTOR = 64 / sizeof(X);

inline __mmask32 first_of(i64 n) { return n >= 32 ? ~0u : (1u << n) - 1; }
template <class X> inline __m512 words_of(const float* p, i64 n) { return _mm512_maskz_loadu_ps((__mmask16)first_of(n), p); }
template <class X> inline __m512 words_of(const f16* p, i64 n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)first_of(n), p));
}
template <class X> inline __m512 words_of(const bf16* p, i64 n) {
  if constexpr (sizeof(X) == 2) return (__m512)_mm512_maskz_loadu_epi16(first_of(n), p);
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)first_of(n), p)), 16);
}
template <class X> inline __m512 words_of(const int8_t* p, i64 n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8((__mmask16)first_of(n), p)));
}

inline Floats with_word(Floats total, Floats keys, const float* word) { return total + keys * *word; }
#if defined(__AVX512BF16__)
inline Floats with_word(Floats total, Floats keys, const bf16* pair) {
  int bits;
  memcpy(&bits, pair, 4);
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)keys, (__m512bh)_mm512_set1_epi32(bits));
}
#endif

// Pack 16 keys; the last one is repeated if there are fewer.
template <class X, class E> inline void pack_keys(const E* keys, i64 pitch, const i64* slots, i64 n, i64 width, float* out) {
  const E* each[LANES];
  for (i64 j = 0; j < LANES; j++) each[j] = keys + slots[smaller(j, n - 1)] * pitch;
  for (i64 d = 0; d < width; d += PER_VECTOR<X>, out += LANES * LANES) {
    __m512 v[4][4];
    UNROLLED for (int i = 0; i < 4; i++)
      UNROLLED for (int j = 0; j < 4; j++) v[i][j] = words_of<X>(each[4 * i + j] + d, width - d);
    turn(v);
    UNROLLED for (int i = 0; i < 4; i++)
      UNROLLED for (int j = 0; j < 4; j++) _mm512_storeu_ps(out + (4 * i + j) * LANES, v[i][j]);
  }
}

template <int ROWS, class X> inline void scores_of(const float* keys, i64 words, const X* x, i64 ldx, float* out, i64 ldo) {
  Floats even[ROWS] = {}, odd[ROWS] = {};
  for (i64 word = 0; word < words; word += 2) {
    const Floats first = load(keys + word * LANES), second = load(keys + (word + 1) * LANES);
    UNROLLED for (int r = 0; r < ROWS; r++) {
      const X* own = x + r * ldx + word * PER_WORD<X>;
      even[r] = with_word(even[r], first, own), odd[r] = with_word(odd[r], second, own + PER_WORD<X>);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) store(out + r * ldo, even[r] + odd[r]);
}

// The numbers between two queries in memory: those after the query's own are zeros.
template <class X> inline i64 pitch_of(i64 width) { return (width + PER_VECTOR<X> - 1) / PER_VECTOR<X> * PER_VECTOR<X>; }

// out[r][j] = x[r] . keys[slots[j]] for n keys and `rows` queries. `out` has room for n rounded up to whole vectors.
template <class E, class X>
void scores_of(const E* keys, i64 pitch, const i64* slots, i64 n, i64 width, const X* x, i64 rows, float* out, i64 ldo) {
  const i64 ldx = pitch_of<X>(width), words = ldx / PER_WORD<X>;
  float* packed = (float*)scratch(0, words * LANES * 4);
  for (i64 j = 0; j < n; j += LANES) {
    ask_for(keys, pitch, slots, j + KEYS_AHEAD<E>, smaller(j + KEYS_AHEAD<E> + LANES, n), width);
    pack_keys<X>(keys, pitch, slots + j, n - j, width, packed);
    for (i64 r = 0; r < rows; r += MOST_SCORED) {
#define CASE(COUNT) case COUNT: scores_of<COUNT>(packed, words, x + r * ldx, ldx, out + r * ldo + j, ldo); break;
      switch (smaller(MOST_SCORED, rows - r)) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
    }
  }
}

#if defined(__AVX512VNNI__)
// Keys in 8 bits meet queries in whole numbers, of which sums are exact: each number of a query is PLANES of 8 bits, in a unit by which the
// largest has 23 bits. Words of four numbers are packed as above; the instruction wants keys without a sign, so 128 is added, and comes off
// the sums.
constexpr int MOST_WHOLE = 4, PLANES = 3;  // queries at a time

template <int ROWS>
inline void whole_scores(const float* keys, i64 words, const int* x, const float* units, float* out, i64 ldo) {
  __m512i total[ROWS][PLANES];
  const int* added = x + ROWS * words * PLANES;
  UNROLLED for (int r = 0; r < ROWS; r++)
    UNROLLED for (int p = 0; p < PLANES; p++) total[r][p] = _mm512_set1_epi32(-added[r * PLANES + p]);
  for (i64 word = 0; word < words; word++, x += ROWS * PLANES) {
    const __m512i own = (__m512i)load(keys + word * LANES);
    UNROLLED for (int r = 0; r < ROWS; r++)
      UNROLLED for (int p = 0; p < PLANES; p++) total[r][p] = _mm512_dpbusd_epi32(total[r][p], own, _mm512_set1_epi32(x[r * PLANES + p]));
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    Floats score = {};
    UNROLLED for (int p = 0; p < PLANES; p++) score = score * 256 + (Floats)_mm512_cvtepi32_ps(total[r][p]);
    store(out + r * ldo, score * units[r]);
  }
}

// Queries [rows, width] as whole numbers: [words][rows][planes, the highest first][4], then 128 times the sum of each of a query's planes.
template <class X> [[gnu::noinline]] void to_whole(const X* x, i64 ldx, i64 rows, i64 width, i64 words, int* out, float* units) {
  memset(out, 0, (words + 1) * rows * PLANES * 4);
  for (i64 r = 0; r < rows; r++) {
    float most = 1e-30f, wrong = 0;
    for (i64 d = 0; d < width; d++) {
      const float v = to_float(x[r * ldx + d]);
      most = std::fmax(most, std::fabs(v)), wrong += v * 0;  // not a number, if a query has one
    }
    units[r] = most / 8355000 + wrong;
    for (i64 d = 0; d < width; d++) {
      int rest = wrong == 0 ? (int)std::lrint(to_float(x[r * ldx + d]) / units[r]) : 0;
      for (int p = PLANES - 1; p >= 0; p--) {
        const int8_t low = (int8_t)rest;
        ((int8_t*)(out + (d / 4 * rows + r) * PLANES + p))[d % 4] = low;
        out[(words * rows + r) * PLANES + p] += 128 * low;
        rest = (rest - low) >> 8;
      }
    }
  }
}

[[gnu::noinline]] void whole_scores(
    const int8_t* keys, i64 pitch, const i64* slots, i64 n, i64 width, i64 rows, const int* x, const float* units, float* packed, float* out,
    i64 ldo) {
  const i64 words = (width + 63) / 64 * LANES, each = (words + 1) * MOST_WHOLE * PLANES;
  for (i64 j = 0; j < n; j += LANES) {
    ask_for(keys, pitch, slots, j + KEYS_AHEAD<int8_t>, smaller(j + KEYS_AHEAD<int8_t> + LANES, n), width);
    for (i64 d = 0; d < width; d += 64) {
      const __mmask64 inside = width - d >= 64 ? ~0ull : (1ull << (width - d)) - 1;
      __m512 v[4][4];
      UNROLLED for (int i = 0; i < LANES; i++)
        v[i / 4][i % 4] = (__m512)(_mm512_maskz_loadu_epi8(inside, keys + slots[smaller(j + i, n - 1)] * pitch + d) ^ _mm512_set1_epi8(-128));
      turn(v);
      UNROLLED for (int i = 0; i < LANES; i++) _mm512_storeu_ps(packed + (d / 4 + i) * LANES, v[i / 4][i % 4]);
    }
    for (i64 r = 0; r < rows; r += MOST_WHOLE) {
      const int* own = x + r / MOST_WHOLE * each;
#define CASE(COUNT) case COUNT: whole_scores<COUNT>(packed, words, own, units + r, out + r * ldo + j, ldo); break;
      switch (smaller(MOST_WHOLE, rows - r)) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
    }
  }
}

template <class X>
void scores_of(const int8_t* keys, i64 pitch, const i64* slots, i64 n, i64 width, const X* x, i64 rows, float* out, i64 ldo) {
  if (!n) return;
  const i64 ldx = pitch_of<X>(width), words = (width + 63) / 64 * LANES, each = (words + 1) * MOST_WHOLE * PLANES;
  float *packed = (float*)scratch(0, (words * LANES + rows + (rows / MOST_WHOLE + 1) * each) * 4), *units = packed + words * LANES;
  int* whole = (int*)(units + rows);
  for (i64 r = 0; r < rows; r += MOST_WHOLE)
    to_whole(x + r * ldx, ldx, smaller(MOST_WHOLE, rows - r), width, words, whole + r / MOST_WHOLE * each, units + r);
  whole_scores(keys, pitch, slots, n, width, rows, whole, units, packed, out, ldo);
}
#endif
#else
template <class X> inline i64 pitch_of(i64 width) { return width; }

// out[r][j] = x[r] . keys[slots[j]] for n keys and `rows` queries. `out` has room for n rounded up to whole vectors.
template <class E, class X>
void scores_of(const E* keys, i64 pitch, const i64* slots, i64 n, i64 width, const X* x, i64 rows, float* out, i64 ldo) {
  for (i64 j = 0; j < n; j += 4) {
    ask_for(keys, pitch, slots, j + KEYS_AHEAD<E>, smaller(j + KEYS_AHEAD<E> + 4, n), width);
    const E* four[4];
    for (int i = 0; i < 4; i++) four[i] = keys + slots[smaller(j + i, n - 1)] * pitch;
    for (i64 r = 0; r < rows; r += MOST_TOKENS) {
      const i64 count = smaller(MOST_TOKENS, rows - r);
      float sums[MOST_SUMS];
      dots<4>(count, 0, four, x + r * width, width, width, Fetched<E>{}, sums);
      for (i64 i = 0; i < count; i++) memcpy(out + (r + i) * ldo + j, sums + 4 * i, 16);
    }
  }
}
#endif

}  // namespace
