// The structures that Python fills (all fields are 8 bytes wide), and the kernels that exist once per instruction set.
#pragma once
#include <cstdint>

typedef int64_t i64;

enum Type : i64 { FLOAT32, BFLOAT16, FLOAT16 };

// One row of a ragged batch. Its queries are the packed tokens start .. end; its keys are the first `length` entries of `slots`.
struct Row {
  i64 start, end, length;
  const i64* slots;
  const uint8_t* visibility;      // [end - start, region]: which of the last `region` keys a query sees; null: causal
  i64 region;
  const i64* region_positions;    // [region], for windows and biases; null: a key's position is its index
  const i64* positions;           // [end - start], of the queries, for windows and biases; null: length - (end - start), ..
};

// Attention of all rows of a batch over the pools of one layer. Strides count elements.
struct Attention {
  const Row* rows;
  i64 num_rows;
  const void *query, *keys, *values, *sinks;  // [T, H, D], [slots, Hkv, D], [slots, Hkv, Dv], [H] or null
  void* out;                                  // [T, H, Dv], contiguous
  i64 type, sinks_type, heads, kv_heads, width, value_width;
  i64 query_token, query_head, key_slot, key_head, value_slot, value_head;
  i64 window;  // a query sees keys less than so many positions before it; 0: all
  i64 kept;    // and those at positions below this
  double scaling, softcap;  // softcap 0: none
  const void* biases;  // [distances, H], of the same type as queries: added to scaled scores, by position of query less key; null: none
  // Of keys and values that are int8, float32 [slots, Hkv]: each number stands for itself times its token's and head's scale. Null: they are of
  // the type of queries.
  const float *key_scales, *value_scales;
  i64 scale_slot, scale_head;
};

// y [rows, n] = x [rows, k] w^T + bias, with w [n, k]. Strides count elements. `streams`: w comes from memory, not from a cache.
// `bits` 0: w is of the same type as x; 8 or 4: it is quantized, in panels of 16 outputs (see quantized.h) that have a scale of type
// `scales` (FLOAT32 or BFLOAT16) per output and `group` inputs (32, 64 or 128; 0: all). `by_columns`: w is [k, n].
struct Linear {
  const void *x, *w, *bias;
  void* y;
  i64 type, rows, n, k, ldx, ldw, ldy, streams, bits, group, scales, by_columns;
};

// An adapter of a layer with k inputs and n outputs: it adds scale * (up (down x) + bias) to a token's output, with down [rank, k], up
// [n, rank] and bias [n] or null, all of `type`. Rank 0: the layer has none.
struct LowRank {
  const void *down, *up, *bias;
  i64 rank, type;
  double scale;
};

// The share of `part` among `parts` of a product's outputs begins here: a multiple of 4, or of what one step computes: a panel of
// quantized weights, a tile of AMX, or a vector of columns.
static inline i64 share_of(const Linear& call, i64 part, i64 parts) {
  const i64 unit = call.bits || call.by_columns || call.type == BFLOAT16 ? 16 : 4;
  return part == parts ? call.n : (call.n / unit * part / parts) * unit;
}

// How rows sample: `kernels.sampling.reference.RowParameters`. Null: it is off in all rows, or `steps` are 0.
struct Sampling {
  const i64 *seeds, *positions, *steps;
  const uint8_t* draws;  // 0: no noise is added
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
};

// The token that each row of scores [rows, vocab] takes. `keys` [rows]: which of the parameters it uses. Noise is that of positions
// `ahead` of the parameters'.
struct Choice {
  const float* scores;
  const i64* keys;
  i64* out;
  i64 rows, vocab, ahead, stream;
  Sampling sampling;
};

// Draft trees of `rows` rows with up to `width` nodes, and the target's scores float32 [.., vocab]: of each row's root, then of its nodes.
struct Drafts {
  const float* scores;
  const i64 *first, *lengths;   // [rows]: the root's line of scores; number of nodes
  const i64 *tokens, *parents;  // [rows, width]; parents null: chains
  i64* table;                   // [rows, 2 width + 2]: see `verification.native`
  i64 rows, width, vocab;
  Sampling sampling;            // positions: the index of the token after the root
};

// A tensor [rows, size[0], size[1], size[2]] in memory.
struct View {
  char* data;
  i64 type, token, stride[3];
};

// What an `Elementwise` computes.
enum Kind : i64 { UNARY, BINARY, MEAN, LAYER_NORM };
enum Unary : i64 {
  COPY, NEGATE, RSQRT, SQRT, EXP, SILU, GELU, GELU_TANH, RELU, TANH, SIGMOID, SQUARE, POWER, RECIPROCAL, ABSOLUTE,
  PLUS, TIMES, OVER, MINUS_FROM, CLAMP
};
enum Binary : i64 { ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM };

// An operation on tensors whose rows are tokens, element by element or along the last dimension.
struct Elementwise {
  i64 kind, function, rows, size[3];
  double scalar, scalar2;
  View out, a, b, c;
};

// What each instruction set provides.
struct Kernels {
  const char* name;
  void (*linear)(const Linear&, i64 first, i64 last);               // outputs first .. last
  void (*low_rank)(const LowRank&, const Linear&, const i64* tokens, i64 count, i64 first, i64 last);  // added to y of these tokens
  void (*dequantize)(const Linear&, i64 first, i64 last);           // y [n, k] = quantized weights of outputs first .. last
  void (*attention)(const Attention&, i64 part, i64 parts);
  void (*elementwise)(const Elementwise&);
};

// Memory of the calling thread, kept from call to call; `which` 0 .. 3.
void* scratch(i64 which, i64 bytes);

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_bf16_kernels();
