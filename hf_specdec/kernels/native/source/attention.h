// Attention of the rows of a ragged batch over a paged cache.
//
// Queries that are next to each other in a row see the same keys but for the last ones, so a block of them reads the shared keys and values once.
// Each query's sums have the order of its own keys, whatever the block.
#pragma once
#include "scores.h"

namespace {

constexpr i64 MOST_QUERIES = 32, SCORE_BYTES = 1 << 20;  // of a block; its scores stay in the second cache
constexpr i64 VALUE_KEYS = 64;  // whose values stay in the first cache while they are read for all queries

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
