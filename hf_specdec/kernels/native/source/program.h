// A forward pass as a list of operations over buffers.
#pragma once
#include <cstring>
#include "abi.h"

enum Operation : i64 { EMBED, ELEMENTWISE, LINEAR, SELECT, WRITE, ATTEND };
enum Rows : i64 { ONE, TOKENS, SELECTED };

// A tensor [rows, size..] in the memory of slot `slot`; offset and strides count elements. Slot -1: absent.
struct Place { i64 slot, offset, type, token, stride[3]; };

struct Op {
  i64 operation, kind, function, rows, size[3];
  i64 waits;  // it needs what other threads computed since the last barrier
  double scalar, scalar2;
  Place out, a, b, c;
  // ATTEND: a: query, b: biases by distance, c: sinks, kind 1: to the keys of the rows' sources; WRITE: a: keys, b: values
  i64 layer, heads, kv_heads, width, value_width, window, kept;
  // LINEAR: a: x, b: weights, function 1: by columns, c: bias, kind: 1 + the LoRA layer whose adapters add to it, 0: none; for the others see
  // `Linear`; the type of quantized weights' scales is b's
  i64 streams, bits, group;
};

// The inputs of one forward.
struct Step {
  i64 num_tokens, num_selected;
  const i64 *ids, *positions, *selected, *write_slots;
  const Row* rows;
  i64 num_rows;
  char* const* pools;  // keys and values of layer 0, of layer 1, ..; then those of the sources
  const Row* sources;  // what an encoder has read for each row; null: no operation reads it
  const LowRank* const* adapters;        // by adapter, and then by LoRA layer
  i64 num_adapters;
  const i64 *groups, *selected_groups;   // [num_adapters, 2]: where each adapter's begin and end in the tokens after it; of selected ones
};

// The index of the first operation that would read an embedding that does not exist; -1: all exist.
i64 check_ids(const Op* ops, i64 num_ops, const Step& step);

void run_program(const Kernels& kernels, const Op* ops, i64 num_ops, char* const* slots, const Step& step, i64 part, i64 parts);

// Drafts chains. At each depth a row's token is chosen, and one forward reads it, of all rows together.
struct Chain {
  const Op* ops;  // the forward
  i64 num_ops;
  char* const* slots;
  const Op* head;  // makes logits of the forward's output; null: the output is logits
  i64 num_head_ops;
  char* const* head_slots;
  char *features, *output;  // [R, width] bytes: what a forward reads of the one before, and what it makes
  i64 width;                // 0: a forward reads ids only
  const char* logits;       // [R, size]; at first these and `output` belong to the texts
  i64 type, size, vocab;    // only the first `vocab` of `size` tokens are chosen
  const i64* target_ids;    // [vocab], what tokens are called; null: by their numbers
  i64 num_rows, num_columns;
  const Row* rows;          // as in the first forward
  const i64* limits;        // [R], tokens of each row
  i64* ids;                 // [R, num_columns], those tokens
  char* const* pools;
  i64 num_tokens;           // the target's vocabulary
  const i64* keys;          // [R], which sampling parameters a row has; null: every row takes its likeliest token
  Sampling sampling;        // positions: the index of a row's first token
};

// -1, or the index of an operation that would read an embedding that does not exist.
i64 run_chain(const Kernels& kernels, const Chain& chain, i64 threads);
