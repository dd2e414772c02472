// Choices among rows of scores. Sampling parameters are those of `kernels.sampling.reference.sampling_scores`; noise is that of
// `kernels.random_bits.reference.gumbel`. Exponentials and logarithms are the C library's, so masses and noise differ from the definitions'
// in their last bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
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

// True if token i with score x comes before token j with score y. NaN is the greatest; of equals, the least token comes first.
inline bool is_before(float x, i64 i, float y, i64 j) {
  if (x < y) return false;
  return x > y || (x != x) > (y != y) || ((x != x) == (y != y) && i < j);
}

// The best token so far.
struct Best {
  float value = -INFINITY;
  i64 id = 0;
  float least() const { return value; }  // no lower score is taken any more
  void see(float x, i64 i) {
    if (is_before(x, i, value, id)) value = x, id = i;
  }
};

// The best `count` tokens so far, best first.
struct Top {
  float* values;
  i64 *ids, count, size = 0;
  float least() const { return size < count ? NAN : values[count - 1]; }
  void see(float x, i64 i) {
    if (size == count && !is_before(x, i, values[count - 1], ids[count - 1])) return;
    i64 at = size < count ? size++ : count - 1;
    for (; at && is_before(x, i, values[at - 1], ids[at - 1]); at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = x, ids[at] = i;
  }
};

// Shows a row's tokens to `best`, less those of groups that are all too low. `names` null: tokens are called by their numbers.
template <class B> inline void see_all(B& best, const float* scores, i64 vocab, const i64* names = nullptr) {
  constexpr i64 GROUP = 32;
  for (i64 first = 0; first < vocab; first += GROUP) {
    const i64 last = std::min(first + GROUP, vocab);
    const float least = best.least();
    int low = 0;
    if (last - first == GROUP)
      for (i64 k = 0; k < GROUP; k++) low += scores[first + k] < least;
    if (low == GROUP) continue;
    for (i64 i = first; i < last; i++) best.see(scores[i], names ? names[i] : i);
  }
}

inline i64 best_of(const float* scores, i64 vocab) {
  Best best;
  see_all(best, scores, vocab);
  return best.id;
}

// A score and its token as one number: in the order of scores, then of tokens.
inline uint64_t key_of(float score, i64 id) {
  const float unsigned_zero = score + 0.0f;
  uint32_t bits;
  memcpy(&bits, &unsigned_zero, 4);
  return (uint64_t)(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | (uint64_t)id;
}

// The least key that top-p keeps: keys are removed in ascending order while the sum of their weights is at most `rest` of the whole.
struct Weighted { uint64_t key; double weight; };
inline uint64_t least_of_top(std::vector<Weighted>& all, float rest) {
  auto first = all.begin(), last = all.end();  // what follows lies in between; `first` itself is kept
  double whole = 0, above = 0;
  for (const Weighted& token : all) whole += token.weight;
  const double least = whole * rest;
  while (last - first > 16) {
    const uint64_t a = first->key, b = first[(last - first) / 2].key, c = last[-1].key;
    const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    const auto middle = std::partition(first, last, [&](const Weighted& token) { return token.key >= pivot; });
    double more = 0;
    for (auto token = first; token < middle; token++) more += token->weight;
    if (whole - above - more > least) above += more, first = middle;
    else last = middle;
  }
  std::sort(first, last, [](const Weighted& a, const Weighted& b) { return a.key > b.key; });
  for (above += first->weight; first + 1 < last && whole - above > least; above += first->weight) first++;
  return first->key;
}

// Divides scores by the temperature, and sets those that top-k, top-p and min-p remove to minus infinity.
inline void apply(const Sampling& sampling, i64 key, float* scores, i64 vocab) {
  if (sampling.temperature)
    for (i64 i = 0; i < vocab; i++) scores[i] /= sampling.temperature[key];
  const i64 top_k = sampling.top_k && sampling.top_k[key] < vocab ? sampling.top_k[key] : 0;
  const float top_p = sampling.top_p ? sampling.top_p[key] : 1, min_p = sampling.min_p ? sampling.min_p[key] : 0;
  const float top = scores[best_of(scores, vocab)];
  if ((top_k <= 0 && top_p >= 1 && min_p <= 0) || !std::isfinite(top)) return;
  float floor = -INFINITY;  // the least score that stays, and the first of equal tokens
  i64 first = 0;
  if (top_k > 0) {
    std::vector<float> best(scores, scores + top_k);  // a heap, the least score first
    std::make_heap(best.begin(), best.end(), std::greater<>());
    for (i64 i = top_k; i < vocab; i++) {
      if (!(scores[i] > best[0])) continue;
      std::pop_heap(best.begin(), best.end(), std::greater<>());
      best.back() = scores[i];
      std::push_heap(best.begin(), best.end(), std::greater<>());
    }
    floor = best[0];
  }
  if (top_p < 1) {
    std::vector<Weighted> all;
    for (i64 i = 0; i < vocab; i++)
      if (scores[i] >= floor) all.push_back({key_of(scores[i], i), expf(scores[i] - top)});
    first = (uint32_t)least_of_top(all, 1 - top_p), floor = scores[first];
  }
  if (min_p > 0) floor = std::max(floor, top + logf(min_p) - 1e-3f);  // spares exponentials of lower ones
  for (i64 i = 0; i < vocab; i++)
    if (scores[i] < floor || (scores[i] == floor && i < first) || (min_p > 0 && expf(scores[i] - top) < min_p)) scores[i] = -INFINITY;
}

// Shows a row's tokens with noise to `best`. A group's smallest exponential number bounds its noise, so other noise is drawn only for
// groups whose tokens may be taken.
template <class B>
inline void see_noisy(B& best, const float* scores, i64 vocab, uint64_t seed, i64 position, i64 step, i64 stream) {
  constexpr i64 GROUP = 8, SPAN = 128, MINIMA = 4;
  const i64 groups = (vocab + GROUP - 1) / GROUP, lanes = groups <= SPAN / 4 ? 1 : 4, apart = SPAN / 4;
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
      if (highest.value + (112.28988f - bits * 8.262958e-08f) <= best.least()) continue;
      least = exponential(word >> 3, 29) / GROUP;
      Words above[2] = {philox(2 * group, position, step, stream, seed), philox(2 * group + 1, position, step, stream, seed)};
      for (i64 i = 0; i < size; i++) {
        float more = i == (word & 7) ? 0 : exponential(above[i / 4].word[i % 4], 32);
        best.see(scores[start + i] - logf(least + more), start + i);
      }
    }
  }
}

// A row's scores after its parameters; they may be in memory that the thread's next call uses.
inline const float* applied(const Sampling& sampling, i64 key, const float* scores, i64 vocab) {
  static thread_local std::vector<float> made;
  if (!(sampling.temperature || sampling.top_k || sampling.top_p || sampling.min_p)) return scores;
  made.assign(scores, scores + vocab);
  apply(sampling, key, made.data(), vocab);
  return made.data();
}

// The token that a row with these parameters takes. `broken`: whether its scores have no finite maximum.
inline i64 choice_of(const Sampling& sampling, i64 key, const float* scores, i64 vocab, i64 ahead, i64 stream, bool* broken = nullptr) {
  scores = applied(sampling, key, scores, vocab);
  const i64 first = broken || !sampling.draws[key] ? best_of(scores, vocab) : 0;
  if (broken) *broken = !std::isfinite(scores[first]);
  if (!sampling.draws[key]) return first;
  Best best;
  see_noisy(best, scores, vocab, sampling.seeds[key], sampling.positions[key] + ahead, sampling.steps ? sampling.steps[key] : 0, stream);
  return best.id;
}

// Walks one tree along the target's own choices: the longest path of nodes that are chosen after their parents; the first of equals.
inline void follow_choices(const Drafts& drafts, i64 row) {
  const i64 width = drafts.width, count = drafts.lengths[row], *tokens = drafts.tokens + row * width;
  std::vector<i64> depth(count + 1, -1), parent(count + 1), chosen(count + 1, -1);  // the root is node 0; depth -1: it is not reached
  std::unique_ptr<bool[]> broken(new bool[count + 1]);
  auto choice = [&](i64 node) {
    const float* scores = drafts.scores + (drafts.first[row] + node) * drafts.vocab;
    if (chosen[node] < 0) chosen[node] = choice_of(drafts.sampling, row, scores, drafts.vocab, depth[node], 0, &broken[node]);
    return chosen[node];
  };
  i64 last = depth[0] = 0, *out = drafts.table + row * (2 * width + 2);
  for (i64 i = 1; i <= count; i++) {
    parent[i] = drafts.parents ? drafts.parents[row * width + i - 1] + 1 : i - 1;
    if (depth[parent[i]] < 0 || choice(parent[i]) != tokens[i - 1]) continue;
    depth[i] = depth[parent[i]] + 1;
    if (depth[i] > depth[last]) last = i;
  }
  for (i64 i = 0; i < width; i++) out[i] = 0, out[width + i] = tokens[i];
  out[2 * width] = choice(last), out[2 * width + 1] = 0;
  for (i64 node = last;; node = parent[node]) {
    out[2 * width + 1] |= drafts.sampling.draws[row] && broken[node];
    if (!node) break;
    out[node - 1] = 1;
  }
}

}  // namespace
