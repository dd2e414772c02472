// Products of tokens with weights of 8 or 4 bits, in integers.
//
// Weights are stored in panels of 16 outputs. A panel holds its scales [groups][16], then (4 bits) its zero points [groups][16], then
// words [k / (32 / bits)][16] of 32 bits: each word has the weights of one output for consecutive inputs, and the even and the odd inputs
// are in its lower and its upper half, so that a shift leaves two neighbours as 16-bit integers. A weight is q * scale with 8 bits, and
// (q - 8) * scale + zero with 4.
//
// Tokens become integers with a common power of two per block of inputs: of 29 bits (two digits of 15 and 14) for float32, and of 15 bits
// and a sign for 16-bit types. Products and sums within a block are exact. So a token's result has the same bits however many others
// there are.
#pragma once
#include "columns.h"

namespace {

constexpr int PANEL_OUTPUTS = 16, PARTS = PANEL_OUTPUTS / LANES;  // vectors per panel
constexpr i64 LONGEST_BLOCK = 128;  // inputs
constexpr i64 AHEAD = FETCHED_TO == 2 ? 4096 : 1024;  // bytes that are fetched ahead of those in use
constexpr int LOW_BITS = 14;  // of the second digit

typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef int16_t LooseShorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int32_t LooseInts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// sums + the products of pairs of 16-bit integers.
inline Ints add_products(Ints sums, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sums + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sums + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Pair `pair` of the weights in words, as 16-bit integers.
template <int BITS> inline Ints pair_of(Ints words, int pair) {
  if (BITS == 4) return (Ints)((Words)words >> 4 * pair & 0x000f000f);
  return pair ? (Ints)((Shorts)words >> 8) : (Ints)((Shorts)words << 8 >> 8);
}

// A block of one token: its integers times `step` are its numbers. `offset`: what each digit's sums begin with.
struct Block {
  float step, sum;
  int32_t offset[2];
};

// How a call's inputs are divided, and where its weights are.
struct Grid {
  i64 padded, block, blocks, groups, scale_bytes, panel_bytes;

  explicit Grid(const Linear& call) {
    const i64 size = call.scales == BFLOAT16 ? 2 : 4, kinds = call.bits == 4 ? 2 : 1;
    padded = (call.k + 7) / 8 * 8, block = call.group ? call.group : LONGEST_BLOCK, blocks = (padded + block - 1) / block;
    groups = call.group ? blocks : 1, scale_bytes = groups * PANEL_OUTPUTS * size;
    panel_bytes = kinds * scale_bytes + padded * PANEL_OUTPUTS * call.bits / 8;
  }
};

// All tokens of a call as integers: pairs [rows][DIGITS][padded / 2], and blocks [rows][blocks].
struct Digits {
  const int32_t* pairs;
  const Block* blocks;
};

// The integers of up to LONGEST_BLOCK numbers (`count` a multiple of 8; `x` has room for full vectors).
template <int DIGITS> inline Block digits_of(const float* x, i64 count, int zero, int16_t* high, int16_t* low) {
  Ints largest = {};
  for (i64 i = 0; i < count; i += LANES) {
    Ints size = (Ints)load(x + i) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  int32_t most = 0;
  for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
  const int exponent = most >> 23, bits = DIGITS == 2 ? 14 + LOW_BITS : 14;
  const bool finite = exponent < 255;
  const int scaled = exponent < 40 ? 40 : exponent;  // below 2^-87: as if that were the largest
  const float factor = as_float(finite ? (uint32_t)(254 - scaled + bits > 254 ? 254 : 254 - scaled + bits) << 23 : 0);
  const float step = finite ? as_float((uint32_t)(scaled - bits) << 23) : NAN;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  Ints high_sum = {}, low_sum = {};
  for (i64 i = 0; i < count; i += LANES) {
    Floats number = load(x + i) * factor, size = number < 0.0f ? -number : number;
    number = size < 4194304.0f ? number + magic - magic : number;  // larger ones are whole
    Ints whole = __builtin_convertvector(number, Ints);
    if (DIGITS == 2) {
      Ints below = whole & ((1 << LOW_BITS) - 1);
      *(LooseShorts*)(low + i) = __builtin_convertvector(below, LooseShorts);
      low_sum += below;
      whole >>= LOW_BITS;
    }
    *(LooseShorts*)(high + i) = __builtin_convertvector(whole, LooseShorts);
    high_sum += whole;
  }
  i64 sums[2] = {};
  for (int i = 0; i < LANES; i++) sums[0] += high_sum[i], sums[1] += low_sum[i];
  const float total = (float)(DIGITS == 2 ? sums[0] * (1 << LOW_BITS) + sums[1] : sums[0]);
  return {step, total * step, {(int32_t)(-zero * sums[0]), (int32_t)(-zero * sums[1])}};
}

template <int DIGITS, class E> Digits digits_of(const Linear& call, const Grid& grid) {
  const i64 pair_bytes = call.rows * DIGITS * (grid.padded + LANES) * 2;
  char* memory = (char*)scratch(0, pair_bytes + 64 + call.rows * grid.blocks * sizeof(Block));
  int16_t* numbers = (int16_t*)memory;
  Block* blocks = (Block*)(memory + (pair_bytes + 63) / 64 * 64);
  const E* x = (const E*)call.x;
  for (i64 t = 0; t < call.rows; t++)
    for (i64 b = 0; b < grid.blocks; b++) {
      float own[LONGEST_BLOCK] = {};
      const i64 from = b * grid.block, to = smaller(from + grid.block, call.k), end = smaller(from + grid.block, grid.padded);
      i64 i = from;
      for (; i + LANES <= to; i += LANES) store(own + i - from, load(x + t * call.ldx + i));
      for (; i < to; i++) own[i - from] = to_float(x[t * call.ldx + i]);
      int16_t* high = numbers + t * DIGITS * grid.padded + from;
      int16_t high_digits[LONGEST_BLOCK + LANES], low_digits[LONGEST_BLOCK + LANES];
      blocks[t * grid.blocks + b] = digits_of<DIGITS>(own, end - from, call.bits == 4 ? 8 : 0, high_digits, low_digits);
      memcpy(high, high_digits, (end - from) * 2);
      if (DIGITS == 2) memcpy(high + grid.padded, low_digits, (end - from) * 2);
    }
  return {(const int32_t*)numbers, blocks};
}

// Where the weights of vector `vector` of outputs are.
template <int BITS> struct Where {
  const char *scales, *words;

  Where() {}
  Where(const Linear& call, const Grid& grid, i64 vector) {
    const char* panel = (const char*)call.w + vector / PARTS * grid.panel_bytes;
    const i64 part = vector % PARTS;
    scales = panel + part * LANES * (call.scales == BFLOAT16 ? 2 : 4);
    words = panel + (BITS == 4 ? 2 : 1) * grid.scale_bytes + part * LANES * 4;
  }
  Ints load(i64 word) const { return *(const LooseInts*)(words + word * PANEL_OUTPUTS * 4); }
  Floats number(const char* p, i64 i, i64 type) const {
    return type == BFLOAT16 ? ::load((const bf16*)p + i) : ::load((const float*)p + i);
  }
  Floats scale(const Linear& call, const Grid& grid, i64 block) const {
    return number(scales, grid.groups == 1 ? 0 : block * PANEL_OUTPUTS, call.scales);
  }
  Floats zero(const Linear& call, const Grid& grid, i64 block) const {
    return BITS == 8 ? (Floats){} : number(scales + grid.scale_bytes, grid.groups == 1 ? 0 : block * PANEL_OUTPUTS, call.scales);
  }
};

// What a tile computes: outputs of VECTORS vectors from `first` on (those from `end` on are not wanted) for COUNT tokens.
struct Tile {
  const Linear& call;
  const Grid& grid;
  i64 first, end;
  Digits x;
};

template <int BITS, int DIGITS, int COUNT, int VECTORS> __attribute__((noinline)) void products(const Tile& tile, Floats* out) {
  const Linear& call = tile.call;
  const Grid& grid = tile.grid;
  const Digits x = tile.x;
  Floats total[COUNT][VECTORS] = {};
  constexpr int PAIRS = 16 / BITS;
  const i64 half = grid.padded / 2;
  Where<BITS> from[VECTORS];
  for (int v = 0; v < VECTORS; v++) from[v] = Where<BITS>(call, grid, smaller(tile.first + v, tile.end - 1));
  for (i64 b = 0; b < grid.blocks; b++) {
    Ints sums[COUNT][DIGITS][VECTORS];
    UNROLLED for (int t = 0; t < COUNT; t++)
      UNROLLED for (int d = 0; d < DIGITS; d++)
        UNROLLED for (int v = 0; v < VECTORS; v++) sums[t][d][v] = (Ints){} + x.blocks[t * grid.blocks + b].offset[d];
    const i64 end = smaller((b + 1) * grid.block, grid.padded) / (2 * PAIRS);
    for (i64 word = b * grid.block / (2 * PAIRS); word < end; word++) {
      Ints own[VECTORS];
      UNROLLED for (int v = 0; v < VECTORS; v++) {
        own[v] = from[v].load(word);
        __builtin_prefetch(from[v].words + word * PANEL_OUTPUTS * 4 + AHEAD, 0, FETCHED_TO);
      }
      UNROLLED for (int pair = 0; pair < PAIRS; pair++) {
        Ints weights[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) weights[v] = pair_of<BITS>(own[v], pair);
        UNROLLED for (int t = 0; t < COUNT; t++)
          UNROLLED for (int d = 0; d < DIGITS; d++) {
            Ints both = (Ints){} + x.pairs[(t * DIGITS + d) * half + word * PAIRS + pair];
            UNROLLED for (int v = 0; v < VECTORS; v++) sums[t][d][v] = add_products(sums[t][d][v], weights[v], both);
          }
      }
    }
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      const Floats scale = from[v].scale(call, grid, b), zero = from[v].zero(call, grid, b);
      UNROLLED for (int t = 0; t < COUNT; t++) {
        const Block& block = x.blocks[t * grid.blocks + b];
        Floats value = __builtin_convertvector(sums[t][0][v], Floats);
        if (DIGITS == 2) value = value * (float)(1 << LOW_BITS) + __builtin_convertvector(sums[t][DIGITS - 1][v], Floats);
        total[t][v] += value * (scale * block.step);
        if (BITS == 4) total[t][v] += zero * block.sum;
      }
    }
  }
  for (int t = 0; t < COUNT; t++)
    for (int v = 0; v < VECTORS; v++) out[t * VECTORS + v] = total[t][v];
}

#if defined(__AVX512F__)
constexpr int MOST_INTEGERS = 24, MORE = 4;  // sums in registers; vectors at a time for few tokens, half as many for more
#else
constexpr int MOST_INTEGERS = 10, MORE = 2;
#endif

// The most tokens of a tile. With half as many vectors there are more tokens than one wide tile has, in equal tiles: at least half as many.
constexpr int most_of(int digits, int vectors) { return MOST_INTEGERS / (digits * vectors) < 12 ? MOST_INTEGERS / (digits * vectors) : 12; }
constexpr int least_of(int digits, int vectors) { return vectors == MORE ? 1 : (most_of(digits, vectors) + 1) / 2; }

// `products` for a number of tokens known at run time.
template <int BITS, int DIGITS, int VECTORS> void products(int count, const Tile& tile, Floats* out) {
#define CASE(COUNT) \
  case COUNT: \
    if constexpr (COUNT >= least_of(DIGITS, VECTORS) && COUNT <= most_of(DIGITS, VECTORS)) products<BITS, DIGITS, COUNT, VECTORS>(tile, out); \
    return;
  switch (count) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
#undef CASE
}

// Write the outputs of a tile for `count` tokens from `token` on; those from `last` on do not exist.
template <class E> void write_tile(const Linear& call, i64 first, i64 last, i64 token, i64 count, i64 vectors, const Floats* total) {
  const E* bias = (const E*)call.bias;
  for (i64 t = 0; t < count; t++)
    for (i64 v = 0; v < vectors; v++) {
      const i64 n = (first + v) * LANES;
      const Floats own = total[t * vectors + v];
      E* y = (E*)call.y + (token + t) * call.ldy;
      if (n + LANES <= last) store(y + n, bias ? own + load(bias + n) : own);
      else
        for (i64 i = n; i < last; i++) store(y + i, bias ? own[i - n] + to_float(bias[i]) : own[i - n]);
    }
}

// Outputs first .. last (`first` a multiple of 16), VECTORS vectors at a time, in tiles of tokens.
template <int BITS, int DIGITS, int VECTORS, class E>
void quantized_by(const Linear& call, const Grid& grid, Digits x, i64 first, i64 last) {
  constexpr i64 MOST = most_of(DIGITS, VECTORS);
  const i64 tiles = (call.rows + MOST - 1) / MOST, end = (last + LANES - 1) / LANES;
  for (i64 v = first / LANES; v < end; v += VECTORS)
    for (i64 tile = 0; tile < tiles; tile++) {
      const i64 t = call.rows * tile / tiles, count = call.rows * (tile + 1) / tiles - t;
      Floats total[MOST * VECTORS];
      const Digits own = {x.pairs + t * DIGITS * (grid.padded / 2), x.blocks + t * grid.blocks};
      products<BITS, DIGITS, VECTORS>((int)count, Tile{call, grid, v, end, own}, total);
      write_tile<E>(call, v, last, t, count, VECTORS, total);
    }
}

template <int BITS, class E> void quantized_of(const Linear& call, i64 first, i64 last) {
  constexpr int DIGITS = sizeof(E) == 4 ? 2 : 1;
  const Grid grid(call);
  const Digits x = digits_of<DIGITS, E>(call, grid);
  if (call.rows * DIGITS * MORE <= MOST_INTEGERS) quantized_by<BITS, DIGITS, MORE, E>(call, grid, x, first, last);
  else quantized_by<BITS, DIGITS, MORE / 2, E>(call, grid, x, first, last);
}

// y [n, k] = the weights of outputs first .. last (`first` a multiple of 16).
template <int BITS, class E> void weights_of(const Linear& call, i64 first, i64 last) {
  constexpr int PAIRS = 16 / BITS;
  const Grid grid(call);
  for (i64 v = first / LANES; v * LANES < last; v++) {
    const Where<BITS> from(call, grid, v);
    for (i64 b = 0; b < grid.blocks; b++) {
      const i64 begin = b * grid.block, end = smaller(begin + grid.block, grid.padded);
      const Floats scale = from.scale(call, grid, b), zero = from.zero(call, grid, b);
      E numbers[LONGEST_BLOCK][LANES];  // by input
      for (i64 word = begin / (2 * PAIRS); word < end / (2 * PAIRS); word++)
        for (int pair = 0; pair < PAIRS; pair++) {
          Ints both = pair_of<BITS>(from.load(word), pair);
          E(*own)[LANES] = numbers + 2 * (word * PAIRS + pair) - begin;
          store(own[0], __builtin_convertvector((both << 16 >> 16) - (BITS == 4 ? 8 : 0), Floats) * scale + zero);
          store(own[1], __builtin_convertvector((both >> 16) - (BITS == 4 ? 8 : 0), Floats) * scale + zero);
        }
      for (i64 n = v * LANES; n < smaller((v + 1) * LANES, last); n++)
        for (i64 k = begin; k < smaller(end, call.k); k++) ((E*)call.y)[n * call.ldy + k] = numbers[k - begin][n - v * LANES];
    }
  }
}

void dequantize(const Linear& call, i64 first, i64 last) {
  by_type(call.type, [&](auto e) { call.bits == 4 ? weights_of<4, decltype(e)>(call, first, last) : weights_of<8, decltype(e)>(call, first, last); });
}

// A product with weights of any kind.
void linear(const Linear& call, i64 first, i64 last) {
  if (call.by_columns) return by_type(call.type, [&](auto e) { linear_by_columns<decltype(e)>(call, first, last); });
  if (!call.bits) return plain_linear(call, first, last);
  by_type(call.type, [&](auto e) { call.bits == 4 ? quantized_of<4, decltype(e)>(call, first, last) : quantized_of<8, decltype(e)>(call, first, last); });
}

}  // namespace
