// What LoRA adapters add to the products of some tokens.
#pragma once
#include "products.h"

namespace {

// The numbers are converted on the way.
template <class From, class To> inline void copy(const From* from, To* to, i64 n) {
  i64 i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
  for (; i < n; i++) store(to + i, to_float(from[i]));
}

template <class E, class C> inline void add_scaled(E* y, const C* change, float scale, i64 n) {
  i64 i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, load(y + i) + scale * load(change + i));
  for (; i < n; i++) store(y + i, to_float(y[i]) + scale * to_float(change[i]));
}

// Outputs first .. last. A token's sums have the same order whatever other tokens have the adapter.
void low_rank(const LowRank& adapter, const Linear& call, const i64* tokens, i64 count, i64 first, i64 last) {
  if (first >= last) return;
  const i64 rank = adapter.rank, type = adapter.type;
  void *x = scratch(1, count * call.k * 4), *inner = scratch(2, count * rank * 4), *change = scratch(3, count * call.n * 4);
  by_type(call.type, [&](auto e) { by_type(type, [&](auto a) {
    for (i64 i = 0; i < count; i++) copy((const decltype(e)*)call.x + tokens[i] * call.ldx, (decltype(a)*)x + i * call.k, call.k);
    plain_linear({x, adapter.down, nullptr, inner, type, count, rank, call.k, call.k, call.k, rank}, 0, rank);
    plain_linear({inner, adapter.up, adapter.bias, change, type, count, call.n, rank, rank, rank, call.n}, first, last);
    for (i64 i = 0; i < count; i++)
      add_scaled((decltype(e)*)call.y + tokens[i] * call.ldy + first, (const decltype(a)*)change + i * call.n + first, (float)adapter.scale, last - first);
  }); });
}

}  // namespace
