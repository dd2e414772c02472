// Vectors of floats as wide as the instruction set that this file is compiled for, and the three element types.
// Everything here has internal linkage: the linker must not choose one instruction set's copy for another.
#pragma once
#include <cstring>
#include <cmath>
#include "abi.h"
// Loops over sums that must stay in registers.
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 12")
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float LooseFloats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
inline i64 larger(i64 a, i64 b) { return a > b ? a : b; }

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// f of a value of the element type.
template <class F> inline auto by_type(i64 type, F f) {
  return type == FLOAT32 ? f(float()) : type == BFLOAT16 ? f(bf16()) : f(f16());
}

inline float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) { return as_float((uint32_t)x.bits << 16); }
inline float to_float(f16 x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return as_float(sign | ((rest << 13) + 0x38000000));
  float small = (float)rest * 0x1p-24f;  // subnormal: exact
  return as_float(sign | as_bits(small));
}

inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) {
  uint32_t bits = as_bits(x);
  to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // round to nearest even
}
inline void store(f16* to, float x) {
  uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) { to->bits = sign | 0x7e00; return; }
  if (rest >= 0x477ff000) { to->bits = sign | 0x7c00; return; }  // from 65520 on: infinite
  if (rest < 0x38800000) {  // subnormal: the addition rounds
    to->bits = sign | (as_bits(as_float(rest) + 0.5f) - 0x3f000000);
    return;
  }
  to->bits = sign | (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
}

inline Floats load(const float* p) { return *(const LooseFloats*)p; }
inline Floats load(const bf16* p) { return (Floats)(__builtin_convertvector(*(const LooseHalves*)p, Words) << 16); }
inline Floats load(const f16* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Floats x;
  for (int i = 0; i < LANES; i++) x[i] = to_float(p[i]);
  return x;
#endif
}

inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Ints x;
  for (int i = 0; i < LANES; i++) x[i] = p[i];
  return __builtin_convertvector(x, Floats);
#endif
}

inline void store(float* p, Floats x) { *(LooseFloats*)p = x; }
inline void store(bf16* p, Floats x) {
  Words bits = (Words)x;
  Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  rounded = x != x ? (Words){} + 0x7fc0 : rounded;
  *(LooseHalves*)p = __builtin_convertvector(rounded, LooseHalves);
}
inline void store(f16* p, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < LANES; i++) store(p + i, x[i]);
#endif
}

inline void store_four(float* p, const float* x) { memcpy(p, x, 16); }
inline void store_four(bf16* p, const float* x) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  typedef uint16_t LooseFour __attribute__((vector_size(8), aligned(2), may_alias));
  Four bits;
  memcpy(&bits, x, 16);
  Four rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  rounded = (bits & 0x7fffffff) > 0x7f800000 ? (Four){} + 0x7fc0 : rounded;
  *(LooseFour*)p = __builtin_convertvector(rounded, LooseFour);
}
inline void store_four(f16* p, const float* x) {
  for (int i = 0; i < 4; i++) store(p + i, x[i]);
}

inline Floats splat(float x) { return (Floats){} + x; }

// The sums of four vectors.
inline void sums_of_four(Floats a, Floats b, Floats c, Floats d, float* out) {
#if defined(__AVX512F__)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  const Floats each[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) out[i] = (each[i][0] + each[i][2]) + (each[i][1] + each[i][3]);
#endif
}

#if defined(__AVX512F__)
// Transpose 4 x 4 within each quarter: v[j] becomes what v[0] .. v[3] have at j.
inline void turn_quarters(__m512 (&v)[4]) {
  __m512d a = (__m512d)_mm512_unpacklo_ps(v[0], v[1]), b = (__m512d)_mm512_unpackhi_ps(v[0], v[1]);
  __m512d c = (__m512d)_mm512_unpacklo_ps(v[2], v[3]), d = (__m512d)_mm512_unpackhi_ps(v[2], v[3]);
  v[0] = (__m512)_mm512_unpacklo_pd(a, c), v[1] = (__m512)_mm512_unpackhi_pd(a, c);
  v[2] = (__m512)_mm512_unpacklo_pd(b, d), v[3] = (__m512)_mm512_unpackhi_pd(b, d);
}

// The transpose of 16 rows; row 4 i + j is v[i][j].
inline void turn(__m512 (&v)[4][4]) {
  UNROLLED for (int i = 0; i < 4; i++) turn_quarters(v[i]);
  UNROLLED for (int j = 0; j < 4; j++) {
    __m512 a = _mm512_shuffle_f32x4(v[0][j], v[1][j], 0x44), b = _mm512_shuffle_f32x4(v[0][j], v[1][j], 0xee);
    __m512 c = _mm512_shuffle_f32x4(v[2][j], v[3][j], 0x44), d = _mm512_shuffle_f32x4(v[2][j], v[3][j], 0xee);
    v[0][j] = _mm512_shuffle_f32x4(a, c, 0x88), v[1][j] = _mm512_shuffle_f32x4(a, c, 0xdd);
    v[2][j] = _mm512_shuffle_f32x4(b, d, 0x88), v[3][j] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}
#endif

// The sum of n floats, in an order that depends on n only.
inline float sum(const float* x, i64 n) {
  Floats total = {};
  i64 i = 0;
  for (; i + LANES <= n; i += LANES) total += load(x + i);
  float out[4], rest = 0;
  sums_of_four(total, total, total, total, out);
  for (; i < n; i++) rest += x[i];
  return out[0] + rest;
}

// e^x to 2 units in the last place; 0 below -87, infinity above 88.7.
inline Floats exp_of(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
#if defined(__AVX512F__)
  const Floats inside = (Floats)_mm512_min_ps((__m512)splat(89), (__m512)x);  // x if it is not a number
#else
  const Floats inside = x > 88.3f ? splat(88.3f) : x;
#endif
  Floats n = inside * 1.44269504f + magic - magic;
  Floats r = inside - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 not_small = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(not_small, (__m512)p, (__m512)n);
#else
  Floats scale = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  Floats result = x < -87.0f ? (Floats){} : p * scale;
  result = x > 88.7f ? splat(INFINITY) : result;
  return x != x ? x : result;
#endif
}

inline Floats tanh_of(Floats x) {
  Floats size = x < 0.0f ? -x : x;
  Floats square = x * x;
  Floats near = x + x * square * (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f + square * 0.0218694885f)));
  Floats far = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
  far = x < 0.0f ? -far : far;
  return size < 0.25f ? near : far;
}

}  // namespace
