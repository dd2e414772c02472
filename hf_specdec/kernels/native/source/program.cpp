#include "program.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr i64 BYTES[] = {4, 2, 2}, FEW_ROWS = 8;

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

// What numbers [width] are in 8 bits, and their scale, as in `kernels.cache.reference.quantized`.
template <class E> void quantize(const E* x, i64 width, int8_t* out, float* scale) {
  typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  Floats most = splat(1e-30f);
  i64 d = 0;
  for (; d + LANES <= width; d += LANES) {
    const Floats v = load(x + d), size = v < 0 ? -v : v;
    most = size > most ? size : most;
  }
  for (; d < width; d++) most[0] = std::fmax(most[0], std::fabs(to_float(x[d])));
  for (int i = 1; i < LANES; i++) most[0] = std::fmax(most[0], most[i]);
  *scale = most[0] / 127;
  for (d = 0; d + LANES <= width; d += LANES)
    *(Bytes*)(out + d) = __builtin_convertvector(__builtin_convertvector(load(x + d) / *scale + magic - magic, Ints), Bytes);
  for (; d < width; d++) out[d] = (int8_t)((splat(to_float(x[d]) / *scale) + magic - magic)[0]);
}

// Copy heads [size[1], size[2]] of every token to its slot of a pool, whose index among all is `index`.
void write_pool(const Place& from, i64 heads, i64 width, i64 index, char* const* slots, const Step& step, i64 first, i64 last) {
  i64 bytes = BYTES[from.type];
  char *data = address(from, slots), *pool = step.pools[index];
  if (step.scales)
    return by_type(from.type, [&](auto e) {
      for (i64 t = first; t < last; t++)
        for (i64 h = 0; h < heads; h++) {
          const i64 place = step.write_slots[t] * heads + h;
          quantize((const decltype(e)*)data + t * from.token + h * from.stride[1], width, (int8_t*)pool + place * width,
                   (float*)step.scales[index] + place);
        }
    });
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
  if (step.scales) {
    call.key_scales = (const float*)step.scales[2 * op.layer], call.value_scales = (const float*)step.scales[2 * op.layer + 1];
    call.scale_slot = op.kv_heads, call.scale_head = 1;
  }
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

bool by_rows(const Op& op) { return op.operation != LINEAR && op.operation != ATTEND; }

// What computes every row from its own inputs: rows first .. last.
void run_rows(const Kernels& kernels, const Op& op, char* const* slots, const Step& step, i64 first, i64 last) {
  if (op.operation == EMBED || op.operation == SELECT) return move_rows(op, slots, step, first, last);
  if (op.operation == WRITE) {
    write_pool(op.a, op.kv_heads, op.width, 2 * op.layer, slots, step, first, last);
    return write_pool(op.b, op.kv_heads, op.value_width, 2 * op.layer + 1, slots, step, first, last);
  }
  Elementwise call = {op.kind, op.function, last - first, {op.size[0], op.size[1], op.size[2]}, op.scalar, op.scalar2,
                      view(op.out, slots, first), view(op.a, slots, first), view(op.b, slots, first), view(op.c, slots, first)};
  kernels.elementwise(call);
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
  for (i64 i = 0; i < num_ops;) {
    const Op& op = ops[i];
    if (op.waits) barrier(parts);
    i64 next = i + 1;
    if (op.operation == LINEAR) multiply(kernels, op, slots, step, part, parts);
    else if (op.operation == ATTEND) attend(kernels, op, slots, step, part, parts);
    else {
      // Operations on the same rows that do not wait run together for a few rows, which stay in the first cache.
      for (; next < num_ops && by_rows(ops[next]) && !ops[next].waits && ops[next].rows == op.rows;) next++;
      const i64 last = count(op, step) * (part + 1) / parts;
      for (i64 first = count(op, step) * part / parts; first < last; first += FEW_ROWS)
        for (i64 j = i; j < next; j++) run_rows(kernels, ops[j], slots, step, first, last < first + FEW_ROWS ? last : first + FEW_ROWS);
    }
    i = next;
  }
}
