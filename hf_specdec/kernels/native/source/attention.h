// Attention of the rows of a ragged batch over a paged cache.
//
// Queries that are next to each other in a row see the same keys but for the last ones, so a block of them reads the shared keys and values once.
// Each query's sums have the order of its own keys, whatever the block.
#pragma once
#include "products.h"

namespace {

constexpr i64 MOST_QUERIES = 32, SCORE_BYTES = 1 << 20;  // of a block; its scores stay in the second cache
constexpr i64 VALUE_KEYS = 64;  // whose values stay in the first cache while they are read for all queries
// Keys and values lie apart, which processors do not foresee: memory is asked for so many of them ahead. Measured for 8 to 64.
template <class E> constexpr i64 KEYS_AHEAD = sizeof(E) > 1 ? 32 : 64;

// The keys that a block of queries sees: all of begin .. common, and each query its own of common .. end.
struct Seen { i64 begin, common, end; };

inline i64 count_of(const Row& row) { return row.end - row.start; }
inline i64 place_of(const Row& row, i64 query) { return row.positions ? row.positions[query] : row.length - count_of(row) + query; }
inline i64 begin_of(const Row& row, i64 query, i64 window) { return window ? larger(0, place_of(row, query) - window + 1) : 0; }
// The end of the keys that this query and all later ones of the row see.
inline i64 common_of(const Row& row, i64 query) {
  return row.visibility ? row.length - row.region : row.length - count_of(row) + query + 1;
}

inline Seen seen_by(const Row& row, i64 first, i64 count, i64 window) {
  const i64 common = common_of(row, first), begin = smaller(begin_of(row, first, window), common);
  return {begin, common, row.visibility ? row.length : common_of(row, first + count - 1)};
}

// The position of a key.
inline i64 place_of_key(const Row& row, i64 key) {
  const i64 i = key - (row.length - row.region);
  return row.region_positions && i >= 0 ? row.region_positions[i] : key;
}

// True if a query sees a key that is not before all queries of its block.
inline bool sees(const Row& row, i64 query, i64 key, const Attention& call) {
  if (!row.visibility) return key < common_of(row, query);
  const i64 i = key - (row.length - row.region), place = place_of_key(row, key);
  return row.visibility[query * row.region + i] && (!call.window || place < call.kept || place_of(row, query) - place < call.window);
}

// The number of queries from `first` on that make a block: their windows begin at the same key.
inline i64 block_from(const Attention& call, const Row& row, i64 first) {
  const i64 bytes = call.heads / call.kv_heads * (row.length + 2 * LANES) * 4, most = larger(1, smaller(MOST_QUERIES, SCORE_BYTES / bytes));
  const i64 begin = begin_of(row, first, call.window);
  i64 count = 1;
  while (count < most && first + count < count_of(row) && begin_of(row, first + count, call.window) == begin) count++;
  return count;
}

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

inline Floats rounded_to(float, Floats x) { return x; }
template <class E> inline Floats rounded_to(E, Floats x) {
  E bits[LANES];
  store(bits, x);
  return load(bits);
}

// How weights of type E meet values of type V.
template <class E, class V> struct Weighing { typedef float Weight; };
#if defined(__AVX512BF16__)
template <> struct Weighing<bf16, bf16> { typedef bf16 Weight; };
#endif

inline void store_weights(float* to, Floats x) { store(to, x); }
#if defined(__AVX512BF16__)
inline void store_weights(bf16* to, Floats x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }  // none is subnormal
#endif

// Weights [n] of a softmax over scores [n], in place and with zeros up to a whole vector, as numbers of type W that E has, too; returns the
// factor that is still to be applied. Rounding to E follows torch, so that texts in low precision are more often the same: its fused
// attention rounds weights before they are divided by their sum; with softcap or sinks the definition rounds scores and weights.
template <class E, class W> inline float softmax(float* scores, i64 n, float scaling, float softcap, const float* sink) {
  const bool in_steps = softcap != 0 || sink;
  W* weights = (W*)scores;
  Ints lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  const auto inside = [&](i64 i, Floats x) { return i + LANES <= n ? x : lane < (int)(n - i) ? x : splat(-INFINITY); };
  for (i64 i = 0; in_steps && i < n; i += LANES) {
    Floats x = rounded_to(E(), rounded_to(E(), load(scores + i)) * scaling);
    if (softcap != 0) x = rounded_to(E(), rounded_to(E(), tanh_of(rounded_to(E(), x / softcap))) * softcap);
    store(scores + i, x);
  }
  if (in_steps) scaling = 1;
  Floats most = splat(-INFINITY);
  for (i64 i = 0; i < n; i += LANES) {
    const Floats x = inside(i, load(scores + i) * scaling);
    most = x > most ? x : most;
  }
  float top = sink ? *sink : -INFINITY;
  for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
  Floats total = {};
  for (i64 i = 0; i < n; i += LANES) {
    const Floats x = exp_of(inside(i, load(scores + i) * scaling - top));
    if (in_steps) store(scores + i, x);
    else if constexpr (sizeof(W) == 2) store_weights(weights + i, x);
    else store(weights + i, rounded_to(E(), x));
    total += x;
  }
  float out[4];
  sums_of_four(total, total, total, total, out);
  if (sink) out[0] += exp_of(splat(*sink - top))[0];
  if (!in_steps) return 1.0f / out[0];
  for (i64 i = 0; i < n; i += LANES) store_weights(weights + i, rounded_to(E(), load(scores + i) / out[0]));
  return 1;
}

// totals[h][d] += the sum over j < n of weights[h][j] * values[slots[j]][d], for HEADS heads and VECTORS * LANES columns. `end`: how many slots
// there are, of which later ones are read next.
template <int HEADS, int VECTORS, class E>
inline void add_columns(const float* weights, i64 stride, const E* values, i64 pitch, const i64* slots, i64 n, i64 end, i64 ldt, float* totals) {
  Floats total[HEADS][VECTORS];
  UNROLLED for (int h = 0; h < HEADS; h++)
    UNROLLED for (int v = 0; v < VECTORS; v++) total[h][v] = load(totals + h * ldt + v * LANES);
  for (i64 j = 0; j < n; j++) {
    const E* value = values + slots[j] * pitch;
    ask_for(values, pitch, slots, j + KEYS_AHEAD<E>, smaller(j + KEYS_AHEAD<E> + 1, end), VECTORS * LANES);
    Floats own[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) own[v] = load(value + v * LANES);
    UNROLLED for (int h = 0; h < HEADS; h++)
      UNROLLED for (int v = 0; v < VECTORS; v++) total[h][v] += own[v] * weights[h * stride + j];
  }
  UNROLLED for (int h = 0; h < HEADS; h++)
    UNROLLED for (int v = 0; v < VECTORS; v++) store(totals + h * ldt + v * LANES, total[h][v]);
}

template <int HEADS, class E>
inline void add_values(const float* weights, i64 stride, const E* values, i64 pitch, const i64* slots, i64 n, i64 end, i64 width, float* totals, i64 ldt) {
  i64 d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES) add_columns<HEADS, 4>(weights, stride, values + d, pitch, slots, n, end, ldt, totals + d);
  if constexpr (sizeof(E) > 1)  // the library stays small
    for (; d + 2 * LANES <= width; d += 2 * LANES) add_columns<HEADS, 2>(weights, stride, values + d, pitch, slots, n, end, ldt, totals + d);
  for (; d + LANES <= width; d += LANES) add_columns<HEADS, 1>(weights, stride, values + d, pitch, slots, n, end, ldt, totals + d);
  for (; d < width; d++)
    for (int h = 0; h < HEADS; h++)
      for (i64 j = 0; j < n; j++) totals[h * ldt + d] += weights[h * stride + j] * to_float(values[slots[j] * pitch + d]);
}

// The same for any number of heads.
template <class E>
[[gnu::noinline]] void add_values(
    i64 heads, const float* weights, i64 stride, const E* values, i64 pitch, const i64* slots, i64 n, i64 end, i64 width, float* totals, i64 ldt) {
  for (i64 h = 0; h < heads;) {
    const float* own = weights + h * stride;
    float* there = totals + h * ldt;
    if (heads - h >= 4) add_values<4>(own, stride, values, pitch, slots, n, end, width, there, ldt), h += 4;
    else if (heads - h >= 2) add_values<2>(own, stride, values, pitch, slots, n, end, width, there, ldt), h += 2;
    else add_values<1>(own, stride, values, pitch, slots, n, end, width, there, ldt), h += 1;
  }
}

#if defined(__AVX512BF16__)
// The same in bfloat16, where two keys' values meet two weights: a word has a number of each.
struct Pairs {
  const bf16* values;
  i64 pitch;
  const i64* slots;
  i64 n, end;

  // Words d .. d + 16 VECTORS of keys j and j + 1; zeros from `width` on, and where there is no key.
  template <int VECTORS> [[gnu::always_inline]] void words(i64 j, i64 d, i64 width, Floats (&out)[VECTORS]) const {
    alignas(64) static constexpr uint16_t ORDER[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const bf16 *first = values + slots[j] * pitch + d, *second = values + slots[smaller(j + 1, n - 1)] * pitch + d;
    UNROLLED for (int v = 0; v < VECTORS; v += 2) {
      const __mmask32 inside = first_of(larger(0, width - d - v * LANES));
      const __m512i x = _mm512_maskz_loadu_epi16(inside, first + v * LANES);
      const __m512i y = _mm512_maskz_loadu_epi16(j + 1 < n ? inside : 0, second + v * LANES);
      UNROLLED for (int half = 0; half < 2; half++) out[v + half] = (Floats)_mm512_permutex2var_epi16(x, _mm512_load_si512(ORDER[half]), y);
    }
  }
  [[gnu::always_inline]] void ask(i64 j, i64 d, i64 width) const {
    ask_for(values + d, pitch, slots, smaller(j + KEYS_AHEAD<bf16>, end), smaller(j + KEYS_AHEAD<bf16> + 2, end), width);
  }
};

// totals [HEADS][32 or 64] += sums of weights times words, of which `words` gives those of pair j.
template <int HEADS, int VECTORS, class F>
inline void add_pairs(const bf16* weights, i64 stride, i64 n, F words, float* totals, i64 ldt) {
  Floats total[HEADS][VECTORS];
  UNROLLED for (int h = 0; h < HEADS; h++)
    UNROLLED for (int v = 0; v < VECTORS; v++) total[h][v] = load(totals + h * ldt + v * LANES);
  for (i64 j = 0; j < n; j += 2) {
    Floats own[VECTORS];
    words(j, own);
    UNROLLED for (int h = 0; h < HEADS; h++)
      UNROLLED for (int v = 0; v < VECTORS; v++) total[h][v] = with_word(total[h][v], own[v], weights + h * stride + j);
  }
  UNROLLED for (int h = 0; h < HEADS; h++)
    UNROLLED for (int v = 0; v < VECTORS; v++) store(totals + h * ldt + v * LANES, total[h][v]);
}

// Few heads read words as they are made, many read them packed: [pair of keys][ldt].
[[gnu::noinline]] void add_values(
    i64 heads, const bf16* weights, i64 stride, const bf16* values, i64 pitch, const i64* slots, i64 n, i64 end, i64 width, float* totals, i64 ldt) {
  const Pairs pairs = {values, pitch, slots, n, end};
  const auto few = [&](auto rows, auto vectors, i64 d) {
    const i64 size = vectors * LANES;
    add_pairs<rows, vectors>(weights, stride, n, [&](i64 j, Floats (&own)[vectors]) {
      pairs.ask(j, d, smaller(size, width - d));
      pairs.words(j, d, width, own);
    }, totals + d, ldt);
  };
  const auto each_part = [&](auto rows) {
    i64 d = 0;
    for (; d + 4 * LANES <= ldt; d += 4 * LANES) few(rows, std::integral_constant<int, 4>(), d);
    if (d < ldt) few(rows, std::integral_constant<int, 2>(), d);
  };
  if (heads == 1) return each_part(std::integral_constant<int, 1>());
  if (heads == 2) return each_part(std::integral_constant<int, 2>());
  if (heads == 4) return each_part(std::integral_constant<int, 4>());
  float* packed = (float*)scratch(0, (n + 1) / 2 * ldt * 4);
  for (i64 j = 0; j < n; j += 2) {
    pairs.ask(j, 0, width);
    for (i64 d = 0; d < ldt; d += 2 * LANES) {
      Floats own[2];
      pairs.words(j, d, width, own);
      store(packed + j / 2 * ldt + d, own[0]), store(packed + j / 2 * ldt + d + LANES, own[1]);
    }
  }
  for (i64 h = 0, count; h < heads; h += count) {
    const auto by = [&](auto rows) {
      count = rows;
      for (i64 d = 0; d < ldt; d += 2 * LANES)
        add_pairs<rows, 2>(weights + h * stride, stride, n, [&](i64 j, Floats (&own)[2]) {
          own[0] = load(packed + j / 2 * ldt + d), own[1] = load(packed + j / 2 * ldt + d + LANES);
        }, totals + h * ldt + d, ldt);
    };
    if (heads - h >= 8) by(std::integral_constant<int, 8>());
    else if (heads - h >= 4) by(std::integral_constant<int, 4>());
    else by(std::integral_constant<int, 1>());
  }
}
#endif

// x[r][j] *= the scale of slots[j], for n slots and `rows` rows.
[[gnu::noinline]] void multiply_by_scales(const float* scales, i64 pitch, const i64* slots, i64 n, i64 rows, float* x, i64 ldx) {
  for (i64 j = 0; j < n; j += LANES) {
    Floats own = splat(1);
    for (i64 i = 0; i < smaller(LANES, n - j); i++) own[i] = scales[slots[j + i] * pitch];
    for (i64 r = 0; r < rows; r++) store(x + r * ldx + j, load(x + r * ldx + j) * own);
  }
}

inline float sink_of(const Attention& call, i64 head) {
  return by_type(call.sinks_type, [&](auto e) { return to_float(((const decltype(e)*)call.sinks)[head]); });
}

// What is added to the score of a head for a key so far before the query.
template <class E> inline float bias_of(const Attention& call, i64 head, i64 distance) {
  return to_float(((const E*)call.biases)[larger(0, distance) * call.heads + head]);
}

// A block of queries [first, first + count) of a row, the heads that share one key head, and keys and values of type V. Row q * group + h of
// queries, scores and totals is head h of query q.
template <class E, class V> void attend(const Attention& call, const Row& row, i64 first, i64 count, i64 kv_head) {
  typedef typename Met<E>::type X;
  typedef typename Weighing<E, V>::Weight W;
  const i64 group = call.heads / call.kv_heads, rows = count * group, width = call.value_width;
  const Seen seen = seen_by(row, first, count, call.window);
  const i64 kept = smaller(call.kept, seen.begin), near = seen.common - seen.begin;  // the keys that all queries see: the first, and near ones
  const i64 shared = kept + near, rest = seen.end - seen.common;
  const i64 ldt = (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), shared_pairs = shared / 2 * 2;
  const i64 padded = (shared + rest + LANES - 1) / LANES * LANES + LANES, padded_rest = (rest + LANES - 1) / LANES * LANES;
  float* scores = (float*)scratch(2, rows * (padded + padded_rest + 1 + ldt) * 4);
  float *own_scores = scores + rows * padded, *factors = own_scores + rows * padded_rest, *totals = factors + rows;
  i64 *own_slots = (i64*)scratch(1, (count * (rest + 2) + shared) * 8), *num_own = own_slots + count * (rest + 1);
  const i64* slots = row.slots + seen.begin;
  if (kept) {
    i64* joined = num_own + count;
    memcpy(joined, row.slots, kept * 8), memcpy(joined + kept, slots, near * 8);
    slots = joined;
  }

  const i64 pitch = pitch_of<X>(call.width);
  X* queries = (X*)scratch(3, rows * pitch * sizeof(X));
  memset(queries, 0, rows * pitch * sizeof(X));
  for (i64 r = 0; r < rows; r++) {
    const E* q = (const E*)call.query + (row.start + first + r / group) * call.query_token + (kv_head * group + r % group) * call.query_head;
    for (i64 d = 0; d < call.width; d++) {
      if constexpr (sizeof(X) == sizeof(E)) memcpy(queries + r * pitch + d, q + d, sizeof(E));
      else queries[r * pitch + d] = to_float(q[d]);
    }
  }

  const float unscaled = 1.0f / (float)call.scaling;  // softmax scales biases, too
  auto score = [&](const auto* keys, const i64* of, i64 n, float* out, i64 ldo) {
    scores_of(keys + kv_head * call.key_head, call.key_slot, of, n, call.width, queries, rows, out, ldo);
    if constexpr (sizeof(V) == 1) multiply_by_scales(call.key_scales + kv_head * call.scale_head, call.scale_slot, of, n, rows, out, ldo);
  };
  auto score_all = [&](const auto* keys) {
    score(keys, slots, shared, scores, padded);
    score(keys, row.slots + seen.common, rest, own_scores, padded_rest);
  };
  score_all((const V*)call.keys);
  for (i64 q = 0; q < count; q++) {
    // Keys' values meet weights in pairs, whatever the block: what is left of shared ones is a query's own.
    i64 n = 0, *own = own_slots + q * (rest + 1);
    if (shared > shared_pairs) *own++ = slots[shared_pairs];
    for (i64 key = seen.common; key < seen.end; key++) {
      if (!sees(row, first + q, key, call)) continue;
      for (i64 r = q * group; r < (q + 1) * group; r++) {
        float& score = scores[r * padded + shared + n] = own_scores[r * padded_rest + key - seen.common];
        if (call.biases) score += unscaled * bias_of<E>(call, kv_head * group + r % group, place_of(row, first + q) - place_of_key(row, key));
      }
      own[n++] = row.slots[key];
    }
    num_own[q] = shared - shared_pairs + n;
  }
  for (i64 r = 0; call.biases && r < rows; r++) {
    const i64 place = place_of(row, first + r / group), head = kv_head * group + r % group;
    for (i64 j = 0; j < shared; j++) scores[r * padded + j] += unscaled * bias_of<E>(call, head, place - (j < kept ? j : seen.begin + j - kept));
  }

  for (i64 r = 0; r < rows; r++) {
    const i64 n = shared_pairs + num_own[r / group];
    const float sink = call.sinks ? sink_of(call, kv_head * group + r % group) : 0;
    factors[r] = softmax<E, W>(scores + r * padded, n, (float)call.scaling, (float)call.softcap, call.sinks ? &sink : nullptr);
  }

  memset(totals, 0, rows * ldt * 4);
  W* weights = (W*)scores;
  const i64 stride = padded * 4 / sizeof(W);
  auto add = [&](i64 heads, W* own, const i64* of, i64 n, i64 end, float* to) {
    if constexpr (sizeof(V) == 1)
      multiply_by_scales(call.value_scales + kv_head * call.scale_head, call.scale_slot, of, n, heads, own, stride);
    add_values(heads, own, stride, (const V*)call.values + kv_head * call.value_head, call.value_slot, of, n, end, width, to, ldt);
  };
  const i64 step = rows <= 4 ? larger(shared_pairs, 1) : VALUE_KEYS;
  for (i64 j = 0; j < shared_pairs; j += step) add(rows, weights + j, slots + j, smaller(step, shared_pairs - j), shared_pairs - j, totals);
  for (i64 q = 0; q < count; q++) {
    add(group, weights + q * group * stride + shared_pairs, own_slots + q * (rest + 1), num_own[q], num_own[q], totals + q * group * ldt);
    E* out = (E*)call.out + ((row.start + first + q) * call.heads + kv_head * group) * width;
    for (i64 h = 0; h < group; h++) {
      const i64 r = q * group + h;
      i64 d = 0;
      for (; d + LANES <= width; d += LANES) store(out + h * width + d, load(totals + r * ldt + d) * factors[r]);
      for (; d < width; d++) store(out + h * width + d, totals[r * ldt + d] * factors[r]);
    }
  }
}

void attention(const Attention& call, i64 part, i64 parts) {
  i64 item = 0;
  for (i64 r = 0; r < call.num_rows; r++) {
    const Row& row = call.rows[r];
    for (i64 first = 0, count; first < count_of(row); first += count) {
      count = block_from(call, row, first);
      for (i64 kv_head = 0; kv_head < call.kv_heads; kv_head++) {
        if (item++ % parts != part) continue;
        by_type(call.type, [&](auto e) {
          if (call.value_scales) attend<decltype(e), int8_t>(call, row, first, count, kv_head);
          else attend<decltype(e), decltype(e)>(call, row, first, count, kv_head);
        });
      }
    }
  }
}

}  // namespace
