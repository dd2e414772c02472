// Products in bfloat16 with AMX: a tile of 16 rows of weights, read in place, meets tiles of 16 tokens.
//
// A tile of weights has 32 numbers of each row. A tile of tokens has the same numbers of 16 tokens, pair by pair: [16 pairs][tokens], so
// tokens are packed once per call and thread. Sums are [outputs][tokens] in float32. Each begins with zero and adds its tiles' products in
// ascending order, so a token's outputs have the same bits whatever other tokens and outputs are computed with them.
#pragma once
#include "vectors.h"

#if defined(__AMX_BF16__)
namespace {

constexpr i64 SIDE = 16, DEPTH = 32;   // rows of weights or tokens of a tile, and numbers of each
constexpr i64 TILE = SIDE * SIDE;      // a tile's words of 32 bits
constexpr i64 MOST_TILES = 6;          // of tokens that meet a tile of weights at once: the other two registers hold what meets
constexpr i64 PACKED_BYTES = 1 << 20;  // of tokens that stay in the second cache while weights meet them several times; measured

// A mask of the numbers of block `block` that exist in a row of k numbers.
inline __mmask32 inside(i64 k, i64 block) { return k - block * DEPTH >= DEPTH ? ~0u : (1u << (k - block * DEPTH)) - 1; }

// Pack tokens [call.rows] to [blocks][tiles][16 pairs][16 tokens]. Numbers from k on are zeros. A tile that is not full repeats the last
// token: columns do not touch each other.
inline void pack(const Linear& call, i64 tiles, i64 blocks, float* out) {
  for (i64 tile = 0; tile < tiles; tile++) {
    const bf16* x[SIDE];
    for (i64 t = 0; t < SIDE; t++) x[t] = (const bf16*)call.x + smaller(tile * SIDE + t, call.rows - 1) * call.ldx;
    for (i64 block = 0; block < blocks; block++) {
      float* to = out + (block * tiles + tile) * TILE;
      __m512 v[4][4];
      UNROLLED for (int i = 0; i < 4; i++)
        UNROLLED for (int j = 0; j < 4; j++)
          v[i][j] = (__m512)_mm512_maskz_loadu_epi16(inside(call.k, block), x[4 * i + j] + block * DEPTH);
      turn(v);
      UNROLLED for (int i = 0; i < 4; i++)
        UNROLLED for (int j = 0; j < 4; j++) _mm512_store_ps(to + (4 * i + j) * SIDE, v[i][j]);
    }
  }
}

struct alignas(64) Configuration {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];  // of a row of each register
  uint8_t rows[16];
};

// Registers 0 .. 5 hold sums and 6 weights of `outputs` rows each, 7 tokens.
inline void configure(i64 outputs) {
  Configuration own = {1};
  for (int i = 0; i < 8; i++) own.bytes[i] = 64, own.rows[i] = i < 7 ? outputs : SIDE;
  asm volatile("" : : "r"(&own) : "memory");  // GCC's intrinsic does not say that it reads all of it
  _tile_loadconfig(&own);
}

// sums[c] = weights times tile c of tokens. `end`: the last numbers of each row, if they do not fill a tile, [16][DEPTH]; or null. The
// first two blocks of the rows that are `ahead` numbers after these are fetched (0: none).
template <int COUNT>
inline void multiply(const bf16* w, i64 ldw, i64 blocks, const bf16* end, const float* x, i64 ahead, float (*sums)[TILE]) {
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define ZERO(C) if constexpr (C < COUNT) _tile_zero(C);
#define ADD(C) if constexpr (C < COUNT) { _tile_loadd(7, x + C * TILE, 64); _tile_dpbf16ps(C, 6, 7); }
#define STORE(C) if constexpr (C < COUNT) _tile_stored(C, sums[C], 64);
  EACH(ZERO)
  for (i64 block = 0; block < blocks; block++, w += DEPTH, x += COUNT * TILE) {
    if (ahead && block + 2 >= blocks)
      for (i64 r = 0; r < SIDE; r++) __builtin_prefetch(w + (2 - blocks) * DEPTH + ahead + r * ldw);
    _tile_loadd(6, w, ldw * 2);
    EACH(ADD)
  }
  if (end) {
    _tile_loadd(6, end, 64);
    EACH(ADD)
  }
  EACH(STORE)
#undef EACH
#undef ZERO
#undef ADD
#undef STORE
}

inline void multiply(i64 count, const bf16* w, i64 ldw, i64 blocks, const bf16* end, const float* x, i64 ahead, float (*sums)[TILE]) {
#define CASE(COUNT) case COUNT: return multiply<COUNT>(w, ldw, blocks, end, x, ahead, sums);
  switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

// The sums of each token; those of token 4 i + j are v[i][j]. Only the first four if `few`, which is faster.
inline void read_sums(const float* sums, bool few, __m512 (&v)[4][4]) {
  if (few) {
    UNROLLED for (int j = 0; j < 4; j++) {
      const float* own = sums + j * SIDE;
      v[0][j] = _mm512_broadcast_f32x4(_mm_load_ps(own));
      v[0][j] = _mm512_mask_broadcast_f32x4(v[0][j], 0x00f0, _mm_load_ps(own + 4 * SIDE));
      v[0][j] = _mm512_mask_broadcast_f32x4(v[0][j], 0x0f00, _mm_load_ps(own + 8 * SIDE));
      v[0][j] = _mm512_mask_broadcast_f32x4(v[0][j], 0xf000, _mm_load_ps(own + 12 * SIDE));
    }
    return turn_quarters(v[0]);
  }
  UNROLLED for (int i = 0; i < 4; i++)
    UNROLLED for (int j = 0; j < 4; j++) v[i][j] = _mm512_load_ps(sums + (4 * i + j) * SIDE);
  turn(v);
}

// Write `outputs` outputs from n on of `count` tokens from `token` on.
inline void write_sums(const Linear& call, i64 n, i64 outputs, i64 token, i64 count, const float* sums) {
  const bf16* bias = (const bf16*)call.bias;
  Floats added = {};
  for (i64 i = 0; bias && i < outputs; i++) added[i] = to_float(bias[n + i]);
  __m512 v[4][4];
  read_sums(sums, count <= 4, v);
  UNROLLED for (int i = 0; i < 4; i++)
    UNROLLED for (int j = 0; j < 4; j++) {
      if (4 * i + j >= count) continue;
      bf16* y = (bf16*)call.y + (token + 4 * i + j) * call.ldy + n;
      Floats own = bias ? (Floats)v[i][j] + added : (Floats)v[i][j];
      if (outputs == SIDE) store(y, own);
      else
        for (i64 o = 0; o < outputs; o++) store(y + o, own[o]);
    }
}

// Outputs first .. last for tokens that fit the cache.
inline void tiles_of(const Linear& call, i64 first, i64 last) {
  const i64 outputs = smaller(SIDE, last - first), full = call.k / DEPTH, blocks = (call.k + DEPTH - 1) / DEPTH;
  const i64 tiles = (call.rows + SIDE - 1) / SIDE, passes = (tiles + MOST_TILES - 1) / MOST_TILES;
  float* x = (float*)scratch(0, tiles * blocks * TILE * 4);
  for (i64 pass = 0; pass < passes; pass++) {
    const i64 tile = tiles * pass / passes, end = tiles * (pass + 1) / passes;
    Linear part = call;
    part.x = (const bf16*)call.x + tile * SIDE * call.ldx, part.rows = call.rows - tile * SIDE;
    pack(part, end - tile, blocks, x + tile * blocks * TILE);
  }
  alignas(64) bf16 end_of_rows[SIDE][DEPTH];
  alignas(64) float sums[MOST_TILES][TILE];
  for (i64 place = first; place < last; place += SIDE) {
    const i64 n = smaller(place, last - outputs);  // the last tile may begin in the one before; equal outputs are written twice
    const bf16* w = (const bf16*)call.w + n * call.ldw;
    for (i64 r = 0; full < blocks && r < outputs; r++)
      _mm512_store_si512(end_of_rows[r], _mm512_maskz_loadu_epi16(inside(call.k, full), w + r * call.ldw + full * DEPTH));
    asm volatile("" : : "r"(x), "r"(end_of_rows) : "memory");  // GCC's intrinsics do not say that tiles read memory
    const i64 ahead = call.streams && n + 2 * SIDE <= last ? SIDE * call.ldw : 0;
    for (i64 pass = 0; pass < passes; pass++) {
      const i64 tile = tiles * pass / passes, count = tiles * (pass + 1) / passes - tile;
      multiply(count, w, call.ldw, full, full < blocks ? end_of_rows[0] : nullptr, x + tile * blocks * TILE,
               pass == 0 ? ahead : 0, sums);
      for (i64 i = tile; i < tile + count; i++)
        write_sums(call, n, outputs, i * SIDE, smaller(SIDE, call.rows - i * SIDE), sums[i - tile]);
    }
  }
}

// How many tiles of tokens, of `bytes` each, are computed before the weights are read again: all if they stay in the cache, otherwise
// what meets a tile of weights at once.
inline i64 most_tiles(i64 tiles, i64 bytes) {
  if (tiles * bytes <= PACKED_BYTES) return larger(tiles, 1);
  return larger(smaller(2 * PACKED_BYTES / bytes, MOST_TILES), 1);
}

// Outputs first .. last. The tiles are released at the end, so that other code in this thread finds them as it left them.
void linear_in_tiles(const Linear& call, i64 first, i64 last) {
  if (first >= last) return;
  configure(smaller(SIDE, last - first));
  const i64 tiles = (call.rows + SIDE - 1) / SIDE, most = most_tiles(tiles, (call.k + DEPTH - 1) / DEPTH * TILE * 4);
  const i64 groups = (tiles + most - 1) / most;
  for (i64 group = 0; group < groups; group++) {
    const i64 token = tiles * group / groups * SIDE, end = smaller(tiles * (group + 1) / groups * SIDE, call.rows);
    Linear part = call;
    part.x = (const bf16*)call.x + token * call.ldx, part.y = (bf16*)call.y + token * call.ldy, part.rows = end - token;
    tiles_of(part, first, last);
  }
  _tile_release();
}

}  // namespace
#endif
