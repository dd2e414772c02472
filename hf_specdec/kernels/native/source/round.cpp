// Rounds of drafts, trees of any shape, level by level: see `Round`.
#include "choice.h"
#include "program.h"
#include "threads.h"
#include <numeric>

namespace {

constexpr i64 SCORES_PER_THREAD = 1 << 17;  // waking a thread takes as long as reading some

// Writes exponentials of x - top [n] to `out`; returns their sum.
float exponentials(const Kernels& kernels, const float* x, i64 n, float top, float* out) {
  const View to = {(char*)out, FLOAT32, n, {0, 0, 1}};
  float mean;
  kernels.elementwise({UNARY, PLUS, 1, {1, 1, n}, -top, 0, to, {(char*)x, FLOAT32, n, {0, 0, 1}}});
  kernels.elementwise({UNARY, EXP, 1, {1, 1, n}, 0, 0, to, to});
  kernels.elementwise({MEAN, 0, 1, {1, 1, n}, 0, 0, {(char*)&mean, FLOAT32, 1, {0, 0, 1}}, to});
  return mean * n;
}

// Keeps all scores.
struct Kept {
  float* scores;
  float least() const { return NAN; }
  void see(float x, i64 i) { scores[i] = x; }
};

struct Frontier {
  std::vector<i64> places;    // [lines], indices among the nodes; -1: the root
  std::vector<float> paths;   // [lines], log-probabilities
  std::vector<uint8_t> seen;  // [lines, read], which of the nodes that have been read are on a node's path
};

// The drafts so far. Texts that end leave `live`, and those that stay move up; a line is a node of the frontier of one of them.
struct Growth {
  const Kernels& kernels;
  const Round& round;
  const i64 threads;
  i64 count, depth = 0, frontier = 1, read = 0;  // live texts; depth of the frontier; its nodes, and all that have been read, per text
  std::vector<i64> live, depths;                 // depths [read] of the nodes that have been read, less 1
  Frontier now, next;
  i64 width = 0;                                 // the most children of a node
  std::vector<i64> tokens;                       // [lines, width], the best children
  std::vector<float> scores, values, noise;      // values [lines, width]: the children's scores or log-probabilities
  std::vector<i64> ids, positions, writes, all, region_positions;  // of the next forward
  std::vector<Row> rows;

  Growth(const Kernels& kernels, const Round& round, i64 threads)
    : kernels(kernels), round(round), threads(threads), count(round.num_texts), live(count), rows(count) {
    now.places.assign(count, -1), now.paths.assign(count, 0);
    std::iota(live.begin(), live.end(), 0);
  }

  i64 threads_for(i64 lines) const { return std::min(threads, 1 + lines * round.vocab / SCORES_PER_THREAD); }

  bool draws(i64 text) const { return round.sampling.draws && round.sampling.draws[text]; }

  template <class B> void see_noise(B& best, const float* row, i64 text, i64 draw) const {
    const Sampling& sampling = round.sampling;
    const i64 step = sampling.steps ? sampling.steps[text] * round.draws + draw : 0;
    see_noisy(best, row, round.num_tokens, sampling.seeds[text], sampling.positions[text] + depth, step, round.stream);
  }

  // Noise [count, num_tokens] that all nodes of a text's frontier share.
  void make_noise() {
    const i64 size = round.num_tokens;
    noise.assign(count * size, 0);
    run_together(threads_for(count), [&](i64 part, i64 parts) {
      for (i64 j = count * part / parts; j < count * (part + 1) / parts; j++) {
        Kept kept = {noise.data() + j * size};
        if (draws(round.texts[live[j]])) see_noise(kept, kept.scores, round.texts[live[j]], 0);
      }
    });
  }

  // The best children of every line.
  void choose() {
    const i64 lines = count * frontier;
    const float* rows = (const float*)round.logits;
    i64 size = round.size;
    if (round.type != FLOAT32) {
      const View from = {(char*)round.logits, round.type, size, {0, 0, 1}};
      size = round.vocab, scores.resize(lines * size), rows = scores.data();
      kernels.elementwise({UNARY, COPY, lines, {1, 1, size}, 0, 0, {(char*)rows, FLOAT32, size, {0, 0, 1}}, from});
    }
    tokens.resize(lines * width), values.resize(lines * width);
    if (round.values && round.sampling.draws && !round.probs) make_noise();
    run_together(threads_for(lines), [&](i64 part, i64 parts) {
      for (i64 line = lines * part / parts; line < lines * (part + 1) / parts; line++) choose(line, rows + line * size);
    });
  }

  void choose(i64 line, const float* row) {
    static thread_local std::vector<float> whole, other;
    const i64 text = round.texts[live[line / frontier]], node = line % frontier;
    const i64 *names = round.target_ids, size = round.sampling.draws ? round.num_tokens : round.vocab;
    Top top = {values.data() + line * width, tokens.data() + line * width, width};
    other.resize(size);
    if (round.sampling.draws) {
      if (names || round.vocab < size) {  // noise belongs to the target's tokens
        whole.assign(size, -INFINITY);
        for (i64 i = 0; i < round.vocab; i++) whole[names ? names[i] : i] = row[i];
        row = whole.data(), names = nullptr;
      }
      row = applied(round.sampling, text, row, size);
    }
    if (round.probs) {
      float* probs = round.probs + (text * round.num_probs + (read ? 1 + read - frontier + node : 0)) * size;
      const View to = {(char*)probs, FLOAT32, size, {0, 0, 1}};
      const float sum = exponentials(kernels, row, size, row[best_of(row, size)], probs);
      kernels.elementwise({UNARY, OVER, 1, {1, 1, size}, sum, 0, to, to});
    }
    const bool ranks_noise = round.values && !round.probs;
    if (draws(text) && ranks_noise) {
      const float* more = noise.data() + line / frontier * size;
      for (i64 i = 0; i < size; i++) other[i] = row[i] + more[i];
      row = other.data();
    }
    if (draws(text) && !ranks_noise) see_noise(top, row, text, node);
    else see_all(top, row, size, names);
    if (!round.values) return;
    const float best = row[best_of(row, size)], sum = logf(exponentials(kernels, row, size, best, other.data()));
    for (i64 i = 0; i < width; i++) top.values[i] = (round.probs ? row[top.ids[i]] : top.values[i]) - best - sum;
  }

  // Makes the children nodes first .. last of live text j.
  void add(i64 j, i64 first, i64 last) {
    const i64 to = round.texts[live[j]] * round.num_nodes;
    for (i64 i = first; i < last; i++) {
      const i64 parent = j * frontier + round.nodes[i].slot, child = parent * width + round.nodes[i].rank;
      round.tokens[to + i] = tokens[child];
      if (round.parents) round.parents[to + i] = now.places[parent];
      if (!round.values) continue;
      const float value = now.paths[parent] + values[child];
      round.values[to + i] = value == value ? value : -INFINITY;
    }
  }

  // True if a draft ends because none of its nodes first .. last is likely enough. Those stay only if they were drawn from `probs`.
  bool ends_at(i64 r, i64 first, i64 last) const {
    if (!round.values) return false;
    float* value = round.values + round.texts[r] * round.num_nodes;
    if (std::any_of(value + first, value + last, [&](float x) { return x >= round.least; })) return false;
    round.limits[r] = depth + (round.probs != nullptr);
    if (round.keep) std::fill(value + first, value + last, -INFINITY);
    return true;
  }

  // The `count` likeliest of a text's nodes, the likeliest first.
  void keep_likeliest(i64 text, i64 count, std::vector<i64>& nodes) const {
    const float* value = round.values + text * round.num_nodes;
    const auto end = nodes.begin() + std::min(count, (i64)nodes.size());
    std::partial_sort(nodes.begin(), end, nodes.end(), [&](i64 i, i64 j) { return is_before(value[i], i, value[j], j); });
    nodes.erase(end, nodes.end());
  }

  // Which of a text's nodes first .. last the next forward reads.
  std::vector<i64> next_frontier(i64 text, i64 first, i64 last) const {
    std::vector<i64> nodes;
    for (i64 i = first; i < last; i++)
      if (round.keep || round.nodes[i].continues) nodes.push_back(i);
    if (round.keep) keep_likeliest(text, round.keep, nodes);
    return nodes;
  }

  // Moves the likeliest nodes of a text to the beginning of its row.
  void prune(i64 text) const {
    const i64 start = text * round.num_nodes;
    i64 *tokens = round.tokens + start, *parents = round.parents + start, *expanded = round.expanded + start, length = 0;
    std::vector<i64> kept, moved(round.num_nodes);
    for (i64 i = 0; i < round.num_nodes; i++)
      if (round.values[start + i] > -INFINITY) kept.push_back(i);
    keep_likeliest(text, round.most, kept);
    std::sort(kept.begin(), kept.end());
    for (i64 i : kept) {
      tokens[length] = tokens[i], expanded[length] = expanded[i], parents[length] = parents[i] < 0 ? -1 : moved[parents[i]];
      moved[i] = length++;
    }
    round.lengths[text] = length;
    for (i64 i = length; i < round.num_nodes; i++) tokens[i] = 0, expanded[i] = -1, parents[i] = i - 1;
  }

  // Reads the next frontier of a text, as the `kept`-th that goes on.
  void enter(i64 kept, i64 j, const std::vector<i64>& chosen) {
    const i64 r = live[j], to = round.texts[r] * round.num_nodes, size = chosen.size(), region = read + size, start = kept * size;
    const i64 length = round.rows[r].length - 1, *slots = round.rows[r].slots;
    for (i64 f = 0; f < size; f++) {
      const i64 i = chosen[f], line = start + f, parent = j * frontier + round.nodes[i].slot;
      next.places[line] = i, next.paths[line] = round.values ? round.values[to + i] : 0;
      ids[line] = round.tokens[to + i], positions[line] = length + depth, writes[line] = slots[length + read + f];
      if (round.expanded) round.expanded[to + i] = read + f;
      memcpy(round.features + line * round.width, round.output + parent * round.width, round.width);
      uint8_t* sees = &next.seen[line * region];
      std::copy_n(now.seen.data() + parent * read, read, sees);
      sees[read + f] = 1;
    }
    for (i64 i = 0; i < region; i++) region_positions[kept * region + i] = length + (i < read ? depths[i] : depth);
    Row& row = rows[kept] = {start, start + size, length + region, slots, nullptr, 0, nullptr, &positions[start]};
    if (region > depth + 1)  // otherwise it is a chain so far
      row.visibility = &next.seen[start * region], row.region = region, row.region_positions = &region_positions[kept * region];
    live[kept] = r;
  }

  // Makes the children nodes first .. last, and the next frontier of the texts that go on. False: all have ended.
  bool advance(i64 first, i64 last) {
    i64 kept = 0, size = 0;
    for (i64 j = 0; j < count; j++) {
      add(j, first, last);
      if (ends_at(live[j], first, last) || depth + 1 == round.limits[live[j]]) continue;
      const std::vector<i64> chosen = next_frontier(round.texts[live[j]], first, last);
      if (!kept) size = chosen.size(), make_room(size);
      enter(kept++, j, chosen);
    }
    count = kept, frontier = size, read += size, depth++;
    depths.insert(depths.end(), size, depth - 1);
    std::swap(now, next);
    return count;
  }

  void make_room(i64 size) {
    const i64 lines = count * size, region = read + size;
    next.places.resize(lines), next.paths.resize(lines), next.seen.assign(lines * region, 0);
    ids.resize(lines), positions.resize(lines), writes.resize(lines), region_positions.resize(count * region);
    all.resize(lines), std::iota(all.begin(), all.end(), 0);
  }
};

}  // namespace

i64 run_round(const Kernels& kernels, const Round& round, i64 threads) {
  Growth growth(kernels, round, threads);
  for (i64 first = 0, last = 0;; first = last) {
    for (growth.width = 0; last < round.num_nodes && round.nodes[last].depth == growth.depth + 1; last++)
      growth.width = std::max(growth.width, round.nodes[last].rank + 1);
    growth.choose();
    if (!growth.advance(first, last)) break;
    const i64 lines = growth.count * growth.frontier;
    const Step step = {lines, lines, growth.ids.data(), growth.positions.data(), growth.all.data(), growth.writes.data(),
                       growth.rows.data(), growth.count, round.pools, round.scales, nullptr};
    const i64 problem = check_ids(round.ops, round.num_ops, step);
    if (problem >= 0) return problem;
    run_together(threads, [&](i64 part, i64 parts) {
      run_program(kernels, round.ops, round.num_ops, round.slots, step, part, parts);
      if (!round.head) return;
      barrier(parts);
      run_program(kernels, round.head, round.num_head_ops, round.head_slots, step, part, parts);
    });
  }
  for (i64 r = 0; r < round.num_texts && round.keep; r++) growth.prune(round.texts[r]);
  return -1;
}
