#include "choice.h"
#include "program.h"
#include "threads.h"
#include <vector>

namespace {

constexpr i64 BYTES[] = {4, 2, 2}, SCORES_PER_THREAD = 1 << 17;  // waking a thread takes as long as reading some

char* address(const Place& place, char* const* slots) {
  return place.slot < 0 ? nullptr : slots[place.slot] + place.offset * BYTES[place.type];
}

// From row `first` on.
View view(const Place& place, char* const* slots, i64 first) {
  char* data = address(place, slots);
  if (data) data += first * place.token * BYTES[place.type];
  return {data, place.type, place.token, {place.stride[0], place.stride[1], place.stride[2]}};
}

i64 count(const Op& op, const Step& step) {
  return op.rows == ONE ? 1 : op.rows == TOKENS ? step.num_tokens : step.num_selected;
}

// The ids that an embedding reads: 0: of tokens, 1: positions.
const i64* ids(const Op& op, const Step& step) { return op.kind == 0 ? step.ids : step.positions; }

// EMBED: out[t] = a[id + function]; SELECT: out[r] = a[selected[r]].
void move_rows(const Op& op, char* const* slots, const Step& step, i64 first, i64 last) {
  i64 bytes = BYTES[op.a.type], width = op.size[2] * bytes;
  char *out = address(op.out, slots), *from = address(op.a, slots);
  for (i64 t = first; t < last; t++) {
    i64 row = op.operation == SELECT ? step.selected[t] : ids(op, step)[t] + op.function;
    memcpy(out + t * op.out.token * bytes, from + row * op.a.token * bytes, width);
  }
}

// Copy heads [size[1], size[2]] of every token to its slot of a pool.
void write_pool(const Place& from, i64 heads, i64 width, char* pool, char* const* slots, const Step& step, i64 first, i64 last) {
  i64 bytes = BYTES[from.type];
  char* data = address(from, slots);
  for (i64 t = first; t < last; t++)
    for (i64 h = 0; h < heads; h++)
      memcpy(pool + ((step.write_slots[t] * heads + h) * width) * bytes, data + (t * from.token + h * from.stride[1]) * bytes,
             width * bytes);
}

void attend(const Kernels& kernels, const Op& op, char* const* slots, const Step& step, i64 part, i64 parts) {
  Attention call = {};
  call.rows = op.kind ? step.sources : step.rows, call.num_rows = step.num_rows;
  call.query = address(op.a, slots), call.query_token = op.a.token, call.query_head = op.a.stride[1];
  call.keys = step.pools[2 * op.layer], call.values = step.pools[2 * op.layer + 1];
  call.key_head = op.width, call.key_slot = op.kv_heads * op.width;
  call.value_head = op.value_width, call.value_slot = op.kv_heads * op.value_width;
  call.sinks = address(op.c, slots), call.sinks_type = op.c.type;
  call.out = address(op.out, slots);
  call.type = op.a.type, call.heads = op.heads, call.kv_heads = op.kv_heads;
  call.width = op.width, call.value_width = op.value_width, call.window = op.window, call.kept = op.kept;
  call.scaling = op.scalar, call.softcap = op.scalar2, call.biases = address(op.b, slots);
  kernels.attention(call, part, parts);
}

void multiply(const Kernels& kernels, const Op& op, char* const* slots, const Step& step, i64 part, i64 parts) {
  Linear call = {address(op.a, slots), address(op.b, slots), address(op.c, slots), address(op.out, slots),
                 op.a.type, count(op, step), op.size[1], op.size[2], op.a.token, op.b.token, op.out.token, op.streams,
                 op.bits, op.group, op.b.type, op.function};
  const i64 first = share_of(call, part, parts), last = share_of(call, part + 1, parts);
  kernels.linear(call, first, last);
  const i64* groups = op.rows == SELECTED ? step.selected_groups : step.groups;
  for (i64 i = 0; op.kind && i < step.num_adapters; i++) {
    const LowRank& adapter = step.adapters[i][op.kind - 1];
    const i64 start = groups[2 * i], count = groups[2 * i + 1] - start;
    if (adapter.rank && count) kernels.low_rank(adapter, call, groups + 2 * step.num_adapters + start, count, first, last);
  }
}

// What computes every row from its own inputs: rows first .. last.
void run_rows(const Kernels& kernels, const Op& op, char* const* slots, const Step& step, i64 first, i64 last) {
  if (op.operation == EMBED || op.operation == SELECT) return move_rows(op, slots, step, first, last);
  if (op.operation == WRITE) {
    write_pool(op.a, op.kv_heads, op.width, step.pools[2 * op.layer], slots, step, first, last);
    return write_pool(op.b, op.kv_heads, op.value_width, step.pools[2 * op.layer + 1], slots, step, first, last);
  }
  Elementwise call = {op.kind, op.function, last - first, {op.size[0], op.size[1], op.size[2]}, op.scalar, op.scalar2,
                      view(op.out, slots, first), view(op.a, slots, first), view(op.b, slots, first), view(op.c, slots, first)};
  kernels.elementwise(call);
}

// The tokens that follow the first `count` rows of logits, those of the rows `live`, `depth` tokens after the texts.
void choose(const Kernels& kernels, const Chain& chain, i64 count, const i64* live, i64 depth, std::vector<float>& scores, i64* tokens, i64 threads) {
  const float* rows = (const float*)chain.logits;
  i64 size = chain.size;
  if (chain.type != FLOAT32) {
    const View from = {(char*)chain.logits, chain.type, size, {0, 0, 1}};
    size = chain.vocab, scores.resize(count * size), rows = scores.data();
    kernels.elementwise({0, 0, count, {1, 1, size}, 0, 0, {(char*)rows, FLOAT32, size, {0, 0, 1}}, from});  // a copy
  }
  run_together(std::min(threads, 1 + count * chain.vocab / SCORES_PER_THREAD), [&](i64 part, i64 parts) {
    static thread_local std::vector<float> whole;
    for (i64 j = count * part / parts; j < count * (part + 1) / parts; j++) {
      const float* row = rows + j * size;
      if (!chain.keys) {
        tokens[j] = best_of(row, chain.vocab, chain.target_ids);
        continue;
      }
      if (chain.target_ids || chain.vocab < chain.num_tokens) {  // noise belongs to the target's tokens
        whole.assign(chain.num_tokens, -INFINITY);
        for (i64 i = 0; i < chain.vocab; i++) whole[chain.target_ids ? chain.target_ids[i] : i] = row[i];
        row = whole.data();
      }
      tokens[j] = choice_of(chain.sampling, chain.keys[live[j]], row, chain.num_tokens, depth, 0);
    }
  });
}

}  // namespace

i64 check_ids(const Op* ops, i64 num_ops, const Step& step) {
  for (i64 i = 0; i < num_ops; i++) {
    if (ops[i].operation != EMBED) continue;
    for (i64 t = 0; t < step.num_tokens; t++) {
      i64 id = ids(ops[i], step)[t] + ops[i].function;
      if (id < 0 || id >= ops[i].size[0]) return i;
    }
  }
  return -1;
}

void run_program(const Kernels& kernels, const Op* ops, i64 num_ops, char* const* slots, const Step& step, i64 part, i64 parts) {
  for (i64 i = 0; i < num_ops; i++) {
    const Op& op = ops[i];
    if (op.waits) barrier(parts);
    if (op.operation == LINEAR) multiply(kernels, op, slots, step, part, parts);
    else if (op.operation == ATTEND) attend(kernels, op, slots, step, part, parts);
    else run_rows(kernels, op, slots, step, count(op, step) * part / parts, count(op, step) * (part + 1) / parts);
  }
}

i64 run_chain(const Kernels& kernels, const Chain& chain, i64 threads) {
  i64 count = chain.num_rows;
  std::vector<i64> live(count), tokens(count), ids(count), positions(count), writes(count), all(count);
  std::vector<Row> rows(count);
  std::vector<float> scores;
  for (i64 r = 0; r < count; r++) live[r] = all[r] = r;
  for (i64 depth = 0;; depth++) {
    choose(kernels, chain, count, live.data(), depth, scores, tokens.data(), threads);
    i64 kept = 0;
    for (i64 j = 0; j < count; j++) {
      const i64 r = live[j];
      chain.ids[r * chain.num_columns + depth] = tokens[j];
      if (depth + 1 == chain.limits[r]) continue;
      Row& row = rows[kept] = chain.rows[r];
      row.start = kept, row.end = kept + 1, row.length += depth;
      ids[kept] = tokens[j], positions[kept] = row.length - 1, writes[kept] = row.slots[row.length - 1];
      memcpy(chain.features + kept * chain.width, chain.output + j * chain.width, chain.width);
      live[kept++] = r;
    }
    if (!(count = kept)) return -1;
    Step step = {count, count, ids.data(), positions.data(), all.data(), writes.data(), rows.data(), count, chain.pools, nullptr};
    const i64 problem = check_ids(chain.ops, chain.num_ops, step);
    if (problem >= 0) return problem;
    run_together(threads, [&](i64 part, i64 parts) {
      run_program(kernels, chain.ops, chain.num_ops, chain.slots, step, part, parts);
      if (!chain.head) return;
      barrier(parts);
      run_program(kernels, chain.head, chain.num_head_ops, chain.head_slots, step, part, parts);
    });
  }
}
