// Operations element by element, and means and norms along the last dimension. All compute in float32 and round once.
#pragma once
#include <type_traits>
#include "vectors.h"

namespace {

constexpr i64 CHUNK = 256;
struct alignas(64) Chunk { float x[CHUNK]; };

// Lines of a tensor's last dimension, next to each other along the one before: `count` of n numbers, `apart` from line to line.
struct Lines {
  i64 place, apart, count, n;
  i64 padded() const { return (n + LANES - 1) / LANES * LANES; }  // of a line in a chunk
};

// Reads lines, and zeros up to a whole vector after each.
template <class E> inline void read(const E* from, i64 stride, const Lines& lines, float* to) {
  const i64 n = lines.n;
  for (i64 line = 0; line < lines.count; line++, from += lines.apart, to += lines.padded()) {
    i64 i = 0;
    if (n % LANES) store(to + n / LANES * LANES, Floats{});
    if (stride == 1)
      for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    else if (stride == 0) {
      const float x = to_float(*from);
      for (; i + LANES <= n; i += LANES) store(to + i, splat(x));
      for (; i < n; i++) to[i] = x;
    }
    for (; i < n; i++) to[i] = to_float(from[i * stride]);
  }
}

template <class E> inline void write(E* to, i64 stride, const Lines& lines, const float* from) {
  for (i64 line = 0; line < lines.count; line++, to += lines.apart, from += lines.padded()) {
    i64 i = 0;
    if (stride == 1)
      for (; i + LANES <= lines.n; i += LANES) store(to + i, load(from + i));
    for (; i < lines.n; i++) store(to + i * stride, from[i]);
  }
}

inline void read(const View& view, const Lines& lines, float* to) {
  by_type(view.type, [&](auto e) { read((const decltype(e)*)view.data + lines.place, view.stride[2], lines, to); });
}

inline void write(const View& view, const Lines& lines, const float* from) {
  by_type(view.type, [&](auto e) { write((decltype(e)*)view.data + lines.place, view.stride[2], lines, from); });
}

inline void read(const View& view, i64 place, i64 n, float* to) { read(view, Lines{place, 0, 1, n}, to); }
inline void write(const View& view, i64 place, i64 n, const float* from) { write(view, Lines{place, 0, 1, n}, from); }

template <class F> inline void each(float* x, i64 n, F f) {
  for (i64 i = 0; i < n; i += LANES) store(x + i, f(load(x + i)));
}

template <class F> inline void each_scalar(float* x, i64 n, F f) {
  for (i64 i = 0; i < n; i++) x[i] = f(x[i]);
}

inline Floats root(Floats x) {
  for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
  return x;
}

// `n` is rounded up to whole vectors by `each`; `read` fills them.
inline void unary(i64 function, float* x, i64 n, float s, float s2) {
  switch (function) {
    case COPY: return;
    case NEGATE: return each(x, n, [](Floats v) { return -v; });
    case RSQRT: return each(x, n, [](Floats v) { return 1.0f / root(v); });
    case SQRT: return each(x, n, [](Floats v) { return root(v); });
    case EXP: return each(x, n, [](Floats v) { return exp_of(v); });
    case SILU: return each(x, n, [](Floats v) { return v / (1.0f + exp_of(-v)); });
    case GELU: return each_scalar(x, n, [](float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f)); });
    case GELU_TANH: return each(x, n, [](Floats v) {
      return 0.5f * v * (1.0f + tanh_of(0.79788456080286536f * (v + 0.044715f * v * v * v)));
    });
    case RELU: return each(x, n, [](Floats v) { return v < 0.0f ? (Floats){} : v; });
    case TANH: return each(x, n, [](Floats v) { return tanh_of(v); });
    case SIGMOID: return each(x, n, [](Floats v) { return 1.0f / (1.0f + exp_of(-v)); });
    case SQUARE: return each(x, n, [](Floats v) { return v * v; });
    case POWER: return each_scalar(x, n, [s](float v) { return powf(v, s); });
    case RECIPROCAL: return each(x, n, [](Floats v) { return 1.0f / v; });
    case ABSOLUTE: return each(x, n, [](Floats v) { return v < 0.0f ? -v : v; });
    case PLUS: return each(x, n, [s](Floats v) { return v + s; });
    case TIMES: return each(x, n, [s](Floats v) { return v * s; });
    case OVER: return each(x, n, [s](Floats v) { return v / s; });
    case MINUS_FROM: return each(x, n, [s](Floats v) { return s - v; });
    default: return each(x, n, [s, s2](Floats v) {  // CLAMP
      v = v < s ? splat(s) : v;
      return v > s2 ? splat(s2) : v;
    });
  }
}

template <class F> inline void both(float* a, const float* b, i64 n, F f) {
  for (i64 i = 0; i < n; i += LANES) store(a + i, f(load(a + i), load(b + i)));
}

inline void binary(i64 function, float* a, const float* b, i64 n) {
  switch (function) {
    case ADD: return both(a, b, n, [](Floats x, Floats y) { return x + y; });
    case SUBTRACT: return both(a, b, n, [](Floats x, Floats y) { return x - y; });
    case MULTIPLY: return both(a, b, n, [](Floats x, Floats y) { return x * y; });
    case DIVIDE: return both(a, b, n, [](Floats x, Floats y) { return x / y; });
    case MAXIMUM: return both(a, b, n, [](Floats x, Floats y) { return x != x ? x : x > y ? x : y; });
    default: return both(a, b, n, [](Floats x, Floats y) { return x != x ? x : x < y ? x : y; });
  }
}

// Places of line (t, i, j): the first element of its last dimension.
inline i64 place(const View& view, i64 t, i64 i, i64 j) { return t * view.token + i * view.stride[0] + j * view.stride[1]; }

// Lines (t, i) of copies, sums and products, all of whole vectors, without a chunk in between. Sums and products are of one type.
template <class E, class O> inline void at_once(const Elementwise& op, i64 t, i64 i) {
  const auto of = [&](const View& view, i64 j) { return (E*)view.data + place(view, t, i, j); };
  const auto all = [](i64 n, O* out, auto f) {
    for (i64 d = 0; d < n; d += LANES) store(out + d, f(d));
  };
  for (i64 j = 0; j < op.size[1]; j++) {
    O* out = (O*)op.out.data + place(op.out, t, i, j);
    const E *a = of(op.a, j), *b = of(op.b, j);
    if (op.kind == UNARY) all(op.size[2], out, [&](i64 d) { return load(a + d); });
    else if constexpr (std::is_same_v<E, O>) {
      const Floats one = splat(op.b.stride[2] ? 0 : to_float(*b));
      if (op.function == ADD) all(op.size[2], out, [&](i64 d) { return load(a + d) + load(b + d); });
      else if (op.b.stride[2]) all(op.size[2], out, [&](i64 d) { return load(a + d) * load(b + d); });
      else all(op.size[2], out, [&](i64 d) { return load(a + d) * one; });
    }
  }
}

inline bool is_at_once(const Elementwise& op) {
  if (op.a.stride[2] != 1 || op.out.stride[2] != 1 || op.size[2] % LANES) return false;
  if (op.kind == UNARY) return op.function == COPY;
  const i64 step = op.b.stride[2];
  return op.kind == BINARY && op.a.type == op.b.type && op.a.type == op.out.type &&
         (op.function == MULTIPLY ? step == 1 || step == 0 : op.function == ADD && step == 1);
}

// Lines (t, i, j) .. (t, i, size[1]), as many as fit a chunk, or the next one in parts; returns how many.
inline i64 lines_by_element(const Elementwise& op, i64 t, i64 i, i64 j) {
  Chunk a, b;
  const Lines one = {0, 0, 1, op.size[2]};
  const i64 count = one.n ? larger(1, smaller(op.size[1] - j, CHUNK / one.padded())) : 1;
  for (i64 first = 0; first < one.n; first += CHUNK) {
    Lines lines = {0, 0, count, smaller(one.n - first, CHUNK)};
    const auto of = [&](const View& view) -> const Lines& {
      lines.place = place(view, t, i, j) + first * view.stride[2], lines.apart = view.stride[1];
      return lines;
    };
    const i64 n = count == 1 ? lines.n : count * lines.padded();
    read(op.a, of(op.a), a.x);
    if (op.kind == BINARY) {
      read(op.b, of(op.b), b.x);
      binary(op.function, a.x, b.x, n);
    } else {
      unary(op.function, a.x, n, (float)op.scalar, (float)op.scalar2);
    }
    write(op.out, of(op.out), a.x);
  }
  return count;
}

inline float sum_of_line(const View& view, i64 t, i64 i, i64 j, i64 n, float minus, bool squared) {
  Chunk a;
  float total = 0;
  for (i64 first = 0; first < n; first += CHUNK) {
    i64 count = n - first < CHUNK ? n - first : CHUNK;
    read(view, place(view, t, i, j) + first * view.stride[2], count, a.x);
    if (squared) for (i64 k = 0; k < count; k++) a.x[k] = (a.x[k] - minus) * (a.x[k] - minus);
    total += sum(a.x, count);
  }
  return total;
}

inline void layer_norm(const Elementwise& op, i64 t, i64 i, i64 j) {
  i64 n = op.size[2];
  float mean = sum_of_line(op.a, t, i, j, n, 0, false) / n;
  float factor = 1 / sqrtf(sum_of_line(op.a, t, i, j, n, mean, true) / n + (float)op.scalar);
  Chunk a, weight, bias;
  for (i64 first = 0; first < n; first += CHUNK) {
    i64 count = n - first < CHUNK ? n - first : CHUNK;
    read(op.a, place(op.a, t, i, j) + first * op.a.stride[2], count, a.x);
    for (i64 k = 0; k < count; k++) weight.x[k] = 1, bias.x[k] = 0;
    if (op.b.data) read(op.b, first, count, weight.x);
    if (op.c.data) read(op.c, first, count, bias.x);
    for (i64 k = 0; k < count; k++) a.x[k] = (a.x[k] - mean) * factor * weight.x[k] + bias.x[k];
    write(op.out, place(op.out, t, i, j) + first * op.out.stride[2], count, a.x);
  }
}

void elementwise(const Elementwise& op) {
  const bool direct = is_at_once(op);
  for (i64 t = 0; t < op.rows; t++)
    for (i64 i = 0; i < op.size[0]; i++)
      if (direct) by_type(op.a.type, [&](auto e) { by_type(op.out.type, [&](auto o) { at_once<decltype(e), decltype(o)>(op, t, i); }); });
      else for (i64 j = 0, lines = 1; j < op.size[1]; j += lines) {
        if (op.kind == MEAN) {
          float mean = sum_of_line(op.a, t, i, j, op.size[2], 0, false) / (float)op.size[2];
          write(op.out, place(op.out, t, i, j), 1, &mean);
        } else if (op.kind == LAYER_NORM) {
          layer_norm(op, t, i, j);
        } else {
          lines = lines_by_element(op, t, i, j);
        }
      }
}

}  // namespace
