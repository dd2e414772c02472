// What LoRA adapters add to the products of some tokens.
#pragma once
#include "elementwise.h"
#include "products.h"

namespace {

// to[i] = from[i], whose types may differ; if `adds`, to[i] + scale * from[i].
void convert(const View& from, i64 place, const View& to, i64 there, i64 n, bool adds, float scale) {
  Chunk a, b;
  for (i64 i = 0; i < n; i += CHUNK) {
    const i64 count = smaller(CHUNK, n - i);
    read(from, place + i, count, a.x);
    if (adds) {
      read(to, there + i, count, b.x);
      both(a.x, b.x, count, [scale](Floats change, Floats y) { return y + scale * change; });
    }
    write(to, there + i, count, a.x);
  }
}

// Outputs first .. last. A token's sums have the same order whatever other tokens have the adapter.
void low_rank(const LowRank& adapter, const Linear& call, const i64* tokens, i64 count, i64 first, i64 last) {
  if (first >= last) return;
  const i64 rank = adapter.rank, type = adapter.type;
  void *x = scratch(1, count * call.k * 4), *inner = scratch(2, count * rank * 4), *change = scratch(3, count * call.n * 4);
  const auto line = [](const void* data, i64 type) { return View{(char*)data, type, 0, {0, 0, 1}}; };
  for (i64 i = 0; i < count; i++) convert(line(call.x, call.type), tokens[i] * call.ldx, line(x, type), i * call.k, call.k, false, 1);
  plain_linear({x, adapter.down, nullptr, inner, type, count, rank, call.k, call.k, call.k, rank}, 0, rank);
  plain_linear({inner, adapter.up, adapter.bias, change, type, count, call.n, rank, rank, rank, call.n}, first, last);
  for (i64 i = 0; i < count; i++)
    convert(line(change, type), i * call.n + first, line(call.y, call.type), tokens[i] * call.ldy + first, last - first, true,
            (float)adapter.scale);
}

}  // namespace
