// The best token of rows of scores, with Gumbel noise where rows sample: `kernels.random_bits.reference.noisy_argmax`, which says how noise
// is made. Logarithms are the C library's, so noise differs from the definition's in its last bits.
#pragma once
#include <cmath>
#include <cstring>
#include <vector>
#include "abi.h"

namespace {

struct Words { uint32_t word[4]; };

// Philox4x32-10.
inline Words philox(uint32_t counter, uint32_t position, uint32_t step, uint32_t stream, uint64_t seed) {
  uint32_t c0 = counter, c1 = position, c2 = step, c3 = stream, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
    uint32_t first = (uint32_t)(b >> 32) ^ c1 ^ k0, third = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)b, c3 = (uint32_t)a, c0 = first, c2 = third;
  }
  return {{c0, c1, c2, c3}};
}

// An exponential number from a uniform one: the centre of a cell of 2^-bits.
inline float exponential(uint32_t word, int bits) {
  float u = (float)((word + 0.5) * ldexp(1.0, -bits));
  return -log1pf(-(u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f));
}

// The maximum so far. NaN is the greatest; the first of equals stays.
struct Best {
  float value = -INFINITY;
  i64 id = 0;
  void see(float x, i64 i) {
    if (x > value || (x != x && value == value)) value = x, id = i;
  }
};

// The name of the best token; of equals, the least name. `names` null: tokens are called by their numbers.
inline i64 best_of(const float* scores, i64 vocab, const i64* names) {
  Best best;
  for (i64 i = 0; i < vocab; i++) {
    best.see(scores[i], i);
    if (names && scores[i] == best.value && names[i] < names[best.id]) best.id = i;
  }
  return names ? names[best.id] : best.id;
}

// A group's smallest exponential number bounds its noise, so other noise is drawn only for groups that may hold the best token.
inline i64 noisy_best_of(const float* scores, i64 vocab, uint64_t seed, i64 position, i64 step, i64 stream) {
  constexpr i64 GROUP = 8, SPAN = 128, MINIMA = 4;
  const i64 groups = (vocab + GROUP - 1) / GROUP, lanes = groups <= SPAN / 4 ? 1 : 4, apart = SPAN / 4;
  Best best;
  for (i64 span = 0; span * apart * lanes < groups; span++) {
    uint32_t words[SPAN];
    for (i64 c = 0; c < apart; c++) {
      Words made = philox(span * apart + c, position, step, stream + MINIMA, seed);
      for (i64 lane = 0; lane < lanes; lane++) words[lane * apart + c] = made.word[lane];
    }
    const i64 first = span * apart * lanes, last = first + apart * lanes < groups ? first + apart * lanes : groups;
    for (i64 group = first; group < last; group++) {
      const i64 start = group * GROUP, size = vocab - start < GROUP ? vocab - start : GROUP;
      Best highest;
      for (i64 i = 0; i < size; i++) highest.see(scores[start + i], i);
      // A float's bits are a lower bound of its base-2 logarithm, so this exceeds the noise, by at most 0.06 if that is large.
      const uint32_t word = words[group - first];
      float least = (float)(word & ~7u | 4);
      int32_t bits;
      memcpy(&bits, &least, 4);
      if (highest.value + (112.28988f - bits * 8.262958e-08f) <= best.value) continue;
      least = exponential(word >> 3, 29) / GROUP;
      Words above[2] = {philox(2 * group, position, step, stream, seed), philox(2 * group + 1, position, step, stream, seed)};
      for (i64 i = 0; i < size; i++) {
        float more = i == (word & 7) ? 0 : exponential(above[i / 4].word[i % 4], 32);
        best.see(scores[start + i] - logf(least + more), start + i);
      }
    }
  }
  return best.id;
}

// Walks one tree along the target's own choices: the longest path of nodes that are chosen after their parents; the first of equals.
inline void follow_choices(const Drafts& drafts, i64 row) {
  const i64 width = drafts.width, count = drafts.lengths[row], *tokens = drafts.tokens + row * width;
  std::vector<i64> depth(count + 1, -1), parent(count + 1), chosen(count + 1, -1);  // the root is node 0; depth -1: it is not reached
  auto scores = [&](i64 node) { return drafts.scores + (drafts.first[row] + node) * drafts.vocab; };
  auto choice = [&](i64 node) {
    if (chosen[node] < 0)
      chosen[node] = drafts.samples[row] ? noisy_best_of(scores(node), drafts.vocab, drafts.seeds[row], drafts.positions[row] + depth[node], 0, 0)
                                         : best_of(scores(node), drafts.vocab, nullptr);
    return chosen[node];
  };
  i64 last = depth[0] = 0, broken = 0, *out = drafts.table + row * (2 * width + 2);
  for (i64 i = 1; i <= count; i++) {
    parent[i] = drafts.parents ? drafts.parents[row * width + i - 1] + 1 : i - 1;
    if (depth[parent[i]] < 0 || choice(parent[i]) != tokens[i - 1]) continue;
    depth[i] = depth[parent[i]] + 1;
    if (depth[i] > depth[last]) last = i;
  }
  for (i64 i = 0; i < width; i++) out[i] = 0, out[width + i] = tokens[i];
  out[2 * width] = choice(last);
  for (i64 node = last;; node = parent[node]) {
    broken |= drafts.samples[row] && !std::isfinite(scores(node)[best_of(scores(node), drafts.vocab, nullptr)]);
    if (!node) break;
    out[node - 1] = 1;
  }
  out[2 * width + 1] = broken;
}

}  // namespace
