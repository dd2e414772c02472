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
  char* const* scales;  // of the same, which are int8 then; null: pools are of the type of what is written
  const Row* sources;  // what an encoder has read for each row; null: no operation reads it
  const LowRank* const* adapters;        // by adapter, and then by LoRA layer
  i64 num_adapters;
  const i64 *groups, *selected_groups;   // [num_adapters, 2]: where each adapter's begin and end in the tokens after it; of selected ones
};

// The index of the first operation that would read an embedding that does not exist; -1: all exist.
i64 check_ids(const Op* ops, i64 num_ops, const Step& step);

void run_program(const Kernels& kernels, const Op* ops, i64 num_ops, char* const* slots, const Step& step, i64 part, i64 parts);

// A node of the shape of drafts: its parent is in place `slot` of the frontier, and it is that one's child of this rank, the best being 0.
struct Node { i64 depth, slot, rank, continues; };

// A round of drafts: trees of one shape, of which chains are the narrowest. At each depth, nodes are the best children of the frontier,
// which is the root at first; then one forward reads the next frontier, of all texts together.
struct Round {
  const Op* ops;  // the forward
  i64 num_ops;
  char* const* slots;
  const Op* head;  // makes logits of the forward's output; null: the output is logits
  i64 num_head_ops;
  char* const* head_slots;
  char *features, *output;  // [lines, width] bytes: what a forward reads of the one before, and what it makes
  i64 width;                // 0: a forward reads ids only
  const char* logits;       // [lines, size]; at first these and `output` belong to the texts
  i64 type, size, vocab;    // only the first `vocab` of `size` tokens are chosen
  const i64* target_ids;    // [vocab], what tokens are called; null: by their numbers
  i64 num_texts;
  const Row* rows;          // as in a forward of one token
  i64* limits;              // [R], depth of each text's draft, lowered where it ends before
  const i64* texts;         // [R], each text's row among the B of the results and of the sampling parameters
  char *const *pools, *const *scales;  // as in a forward
  const Node* nodes;        // in the order of their depths
  i64 num_nodes;
  i64 keep;                 // the frontier is the `keep` likeliest nodes of a depth, and at last the `most` likeliest of all are kept, in
                            // their order; 0: the frontier is the nodes that `continue`, and all are kept
  i64 most;
  double least;             // a draft ends where no path has this log-probability
  i64* lengths;             // [B], how many nodes are kept
  i64* tokens;              // [B, num_nodes]
  float* values;            // [B, num_nodes], log-probabilities of the paths; null: nobody asks
  i64 *parents, *expanded;  // [B, num_nodes], parents' indices, and when among a text's nodes they were read, or -1; null: nobody asks
  float* probs;             // [B, num_probs, num_tokens], what children were drawn from: the root's, then by `expanded`; null: nobody asks
  i64 num_probs;
  i64 num_tokens;           // the target's vocabulary
  i64 stream, draws;        // of noise; with `steps`, which have so many draws, every node of a depth has its own
  Sampling sampling;        // positions: the index of a text's first new token; `draws` null: every node takes its likeliest tokens
};

// -1, or the index of an operation that would read an embedding that does not exist.
i64 run_round(const Kernels& kernels, const Round& round, i64 threads);
