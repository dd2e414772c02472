// Attention of the rows of a ragged batch over a paged cache.
#pragma once
#include "products.h"

namespace {

// The slots of the keys that one query of a row sees, in order; returns their number.
inline i64 visible_slots(const Row& row, i64 query, i64 window, i64* out) {
  i64 count = row.end - row.start, before = row.length - row.region;
  i64 position = row.positions ? row.positions[query] : row.length - count + query;
  i64 end = row.visibility ? before : row.length - count + query + 1;
  i64 begin = window ? larger(0, position - window + 1) : 0;
  i64 found = 0;
  for (i64 key = begin; key < end; key++) out[found++] = row.slots[key];
  if (!row.visibility) return found;
  const uint8_t* seen = row.visibility + query * row.region;
  for (i64 i = 0; i < row.region; i++) {
    i64 place = row.region_positions ? row.region_positions[i] : before + i;
    if (seen[i] && (!window || position - place < window)) out[found++] = row.slots[before + i];
  }
  return found;
}

inline Floats rounded_to(float, Floats x) { return x; }
template <class E> inline Floats rounded_to(E, Floats x) {
  E bits[LANES];
  store(bits, x);
  return load(bits);
}

// Weights [n] of a softmax over scores [n], in place; returns the factor that is still to be applied. `padded` is n rounded up to whole
// vectors: the scores have room for it. Rounding to E follows torch, so that texts in low precision are more often the same: its fused
// attention rounds weights before they are divided by their sum; with softcap or sinks the definition rounds scores and weights.
template <class E> inline float softmax(float* scores, i64 n, i64 padded, float scaling, float softcap, const float* sink) {
  bool in_steps = softcap != 0 || sink;
  for (i64 i = n; i < padded; i++) scores[i] = 0;
  for (i64 i = 0; i < padded; i += LANES) {
    Floats x = in_steps ? rounded_to(E(), rounded_to(E(), load(scores + i)) * scaling) : load(scores + i) * scaling;
    if (softcap != 0) x = rounded_to(E(), rounded_to(E(), tanh_of(rounded_to(E(), x / softcap))) * softcap);
    store(scores + i, x);
  }
  for (i64 i = n; i < padded; i++) scores[i] = -INFINITY;
  Floats most = splat(-INFINITY);
  for (i64 i = 0; i < padded; i += LANES) {
    Floats x = load(scores + i);
    most = x > most ? x : most;
  }
  float top = sink ? *sink : -INFINITY;
  for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
  Floats total = {};
  for (i64 i = 0; i < padded; i += LANES) {
    Floats x = exp_of(load(scores + i) - top);
    store(scores + i, in_steps ? x : rounded_to(E(), x));
    total += x;
  }
  float out[4];
  sums_of_four(total, total, total, total, out);
  if (sink) out[0] += exp_of(splat(*sink - top))[0];
  if (!in_steps) return 1.0f / out[0];
  for (i64 i = 0; i < padded; i += LANES) store(scores + i, rounded_to(E(), load(scores + i) / out[0]));
  return 1;
}

// out[h][d] = factors[h] * sum of weights[h][j] * values[slots[j]][d] for HEADS heads and VECTORS * LANES columns.
template <int HEADS, int VECTORS, class E>
inline void weighted_sum(const float* weights, i64 stride, const E* values, i64 slot, const i64* slots, i64 n, const float* factors, E* out,
                         i64 ldo) {
  Floats total[HEADS][VECTORS] = {};
  for (i64 j = 0; j < n; j++) {
    const E* value = values + slots[j] * slot;
    Floats own[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) own[v] = load(value + v * LANES);
    UNROLLED for (int h = 0; h < HEADS; h++)
      UNROLLED for (int v = 0; v < VECTORS; v++) total[h][v] += own[v] * weights[h * stride + j];
  }
  UNROLLED for (int h = 0; h < HEADS; h++)
    UNROLLED for (int v = 0; v < VECTORS; v++) store(out + h * ldo + v * LANES, total[h][v] * factors[h]);
}

template <int HEADS, class E>
inline void weighted_sums(const float* weights, i64 stride, const E* values, i64 slot, const i64* slots, i64 n, i64 width,
                          const float* factors, E* out) {
  i64 d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES)
    weighted_sum<HEADS, 4>(weights, stride, values + d, slot, slots, n, factors, out + d, width);
  for (; d + 2 * LANES <= width; d += 2 * LANES)
    weighted_sum<HEADS, 2>(weights, stride, values + d, slot, slots, n, factors, out + d, width);
  for (; d + LANES <= width; d += LANES)
    weighted_sum<HEADS, 1>(weights, stride, values + d, slot, slots, n, factors, out + d, width);
  for (; d < width; d++)
    for (int h = 0; h < HEADS; h++) {
      float total = 0;
      for (i64 j = 0; j < n; j++) total += weights[h * stride + j] * to_float(values[slots[j] * slot + d]);
      store(out + h * width + d, total * factors[h]);
    }
}

// One query token, the heads that share one key head.
template <class E> void attend(const Attention& call, const Row& row, i64 query, i64 kv_head) {
  typedef typename Met<E>::type X;
  i64 group = call.heads / call.kv_heads, token = row.start + query;
  i64 padded = (row.length + LANES - 1) / LANES * LANES + LANES;
  i64* slots = (i64*)scratch(1, (row.length + 4) * 8);
  float* scores = (float*)scratch(2, group * (padded + 1) * 4);
  float* factors = scores + group * padded;
  X* queries = (X*)scratch(3, group * call.width * sizeof(X));
  i64 n = visible_slots(row, query, call.window, slots);
  const E* q = (const E*)call.query + token * call.query_token + kv_head * group * call.query_head;
  for (i64 h = 0; h < group; h++)
    for (i64 d = 0; d < call.width; d++) {
      if constexpr (sizeof(X) == sizeof(E)) memcpy(queries + h * call.width + d, q + h * call.query_head + d, sizeof(E));
      else queries[h * call.width + d] = to_float(q[h * call.query_head + d]);
    }
  const E* keys = (const E*)call.keys + kv_head * call.key_head;
  for (i64 j = 0; j < n; j += 4) {
    const E* four[4];
    for (int i = 0; i < 4; i++) four[i] = keys + slots[smaller(j + i, n - 1)] * call.key_slot;
    for (i64 h = 0; h < group; h += MOST_TOKENS) {
      int count = (int)smaller(MOST_TOKENS, group - h);
      float sums[MOST_SUMS];
      dots<4>(count, four, queries + h * call.width, call.width, Part{0, call.width, true, nullptr}, 0, Fetched<E>{}, sums);
      for (int i = 0; i < count; i++) memcpy(scores + (h + i) * padded + j, sums + 4 * i, 16);
    }
  }
  i64 used = (n + LANES - 1) / LANES * LANES;
  for (i64 h = 0; h < group; h++) {
    i64 head = kv_head * group + h;
    float sink = 0;
    if (call.sinks) sink = call.sinks_type == FLOAT32 ? ((const float*)call.sinks)[head]
                         : call.sinks_type == BFLOAT16 ? to_float(((const bf16*)call.sinks)[head])
                         : to_float(((const f16*)call.sinks)[head]);
    factors[h] = softmax<E>(scores + h * padded, n, used, (float)call.scaling, (float)call.softcap, call.sinks ? &sink : nullptr);
  }
  const E* values = (const E*)call.values + kv_head * call.value_head;
  E* out = (E*)call.out + (token * call.heads + kv_head * group) * call.value_width;
  for (i64 h = 0; h < group;) {
    E* there = out + h * call.value_width;
    const float* own = scores + h * padded;
    if (group - h >= 4) weighted_sums<4>(own, padded, values, call.value_slot, slots, n, call.value_width, factors + h, there), h += 4;
    else if (group - h >= 2) weighted_sums<2>(own, padded, values, call.value_slot, slots, n, call.value_width, factors + h, there), h += 2;
    else weighted_sums<1>(own, padded, values, call.value_slot, slots, n, call.value_width, factors + h, there), h += 1;
  }
}

void attention(const Attention& call, i64 part, i64 parts) {
  i64 item = 0;
  for (i64 r = 0; r < call.num_rows; r++) {
    const Row& row = call.rows[r];
    for (i64 kv_head = 0; kv_head < call.kv_heads; kv_head++)
      for (i64 query = 0; query < row.end - row.start; query++) {
        if (item++ % parts != part) continue;
        if (call.type == FLOAT32) attend<float>(call, row, query, kv_head);
        else if (call.type == BFLOAT16) attend<bf16>(call, row, query, kv_head);
        else attend<f16>(call, row, query, kv_head);
      }
  }
}

}  // namespace
