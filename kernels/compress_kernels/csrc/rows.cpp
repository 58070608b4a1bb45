// What a decoder does between its matrix products, row by row: every row goes through the same
// instructions, wherever it lies. Rounded to the dtype where torch rounds.

#include <cmath>
#include <cstdint>
#include <vector>

#include "stored.h"

// All mirrored in cpu/rows.py. kind: of x and out; strides are in numbers.

// Numbers of a head lie side by side; heads, and rows of them, lie anywhere.
struct Heads {
  void* data;
  int64_t row, head;  // strides

  template <typename T>
  T* at(int64_t r, int64_t h) const { return static_cast<T*>(data) + r * row + h * head; }
};

struct RmsNorm {
  Heads x, out;        // [rows, heads, width]
  const void* weight;  // [width] of `kind`, or fp32 where late
  int64_t rows, heads, width;
  float eps;
  int32_t late, kind;
};

struct Rotate {
  Heads x, out;      // [rows, heads, dim]
  const float* cos;  // [rows, pairs]
  const float* sin;
  int64_t rows, heads, dim, pairs;
  int32_t late, kind;  // late: rounded once, behind all of it
  int32_t interleaved;  // the two of a pair are neighbours in x; out has all first ones, then all others
};

struct Gate {
  const void* gate;  // [rows, width], rows `stride` apart
  const void* up;    // as gate
  void* out;         // [rows, width]
  int64_t rows, width, stride;
  int32_t function, kind;  // 0: silu, 1: gelu by tanh
};

struct Spread {
  Heads x, out;                    // [rows, heads, dim]
  int64_t rows, heads, dim, size;  // size: of each part that is turned, a power of two
  int32_t kind;
};

struct Gather {
  const void* from;      // [any, width] of `kind`
  const int64_t* index;  // [rows]
  float* out;            // [rows, width]
  int64_t rows, width;
  float factor;
  int32_t kind;
};

struct Add {
  const float* x;  // [rows, width]
  const float* other;
  float* out;  // may be x
  int64_t rows, width;
};

namespace {

template <typename T>
Vec load_at(const void* from, int64_t at, int64_t left) {
  return load_stored(static_cast<const T*>(from) + at, left);
}

template <typename T>
Vec settled(Vec x) {
  return nearest_of(x, static_cast<const T*>(nullptr));
}

// A product by itself: fused with the sum behind it, it would not be rounded as torch rounds it.
inline Vec product(Vec a, Vec b) {
  Vec x = a * b;
  asm("" : "+m"(x));
  return x;
}

template <typename T>
void norm_of(const RmsNorm& n, const T* x, T* out) {
  Vec sums{};
  for (int64_t c = 0; c < n.width; c += kRows) {
    const Vec part = load_stored(x + c, n.width - c);
    sums += part * part;
  }
  float sum = 0.0f;
  for (int i = 0; i < kRows; ++i) sum += sums[i];
  const Vec scale = splat(1.0f / std::sqrt(sum / static_cast<float>(n.width) + n.eps));
  for (int64_t c = 0; c < n.width; c += kRows) {
    const int64_t left = n.width - c;
    const Vec scaled = load_stored(x + c, left) * scale;
    const Vec y = n.late ? scaled * load_at<float>(n.weight, c, left)
                         : settled<T>(scaled) * load_at<T>(n.weight, c, left);
    store_stored(y, out + c, left);
  }
}

template <typename T>
void norm(const RmsNorm& n) {
  for (int64_t row = 0; row < n.rows; ++row)
    for (int64_t head = 0; head < n.heads; ++head)
      norm_of(n, n.x.at<const T>(row, head), n.out.at<T>(row, head));
}

template <typename T>
void turn(const Rotate& r) {
  std::vector<T> apart(r.interleaved ? 2 * r.pairs : 0);
  for (int64_t row = 0; row < r.rows; ++row)
    for (int64_t head = 0; head < r.heads; ++head) {
      const T* from = r.x.at<const T>(row, head);
      for (int64_t c = 0; c < r.pairs * r.interleaved; ++c)
        apart[c] = from[2 * c], apart[r.pairs + c] = from[2 * c + 1];
      const T* x = r.interleaved ? apart.data() : from;
      T* out = r.out.at<T>(row, head);
      for (int64_t c = 0; c < r.pairs; c += kRows) {
        const int64_t left = r.pairs - c;
        const Vec cos = load_at<float>(r.cos, row * r.pairs + c, left);
        const Vec sin = load_at<float>(r.sin, row * r.pairs + c, left);
        const Vec a = load_stored(x + c, left), b = load_stored(x + r.pairs + c, left);
        Vec terms[] = {product(a, cos), product(b, sin), product(b, cos), product(a, sin)};
        if (!r.late)
          for (Vec& term : terms) term = settled<T>(term);
        const Vec one = terms[0] - terms[1], two = terms[2] + terms[3];
        store_stored(one, out + c, left);
        store_stored(two, out + r.pairs + c, left);
      }
      std::memcpy(out + 2 * r.pairs, from + 2 * r.pairs, (r.dim - 2 * r.pairs) * sizeof(T));
    }
}

inline Vec at_most(Vec x, float limit) { return x > splat(limit) ? splat(limit) : x; }

inline Vec silu(Vec x) { return x / (exponential(at_most(-x, 87.0f)) + 1.0f); }

inline Vec gelu_tanh(Vec x) {
  const Vec inner = 0.7978845608f * (x + 0.044715f * (x * x * x));
  return x / (exponential(at_most(-2.0f * inner, 87.0f)) + 1.0f);
}

template <typename T, Vec (*function)(Vec)>
void gate(const Gate& g) {
  for (int64_t row = 0; row < g.rows; ++row)
    for (int64_t c = 0; c < g.width; c += kRows) {
      const int64_t at = row * g.stride + c, left = g.width - c;
      const Vec made = settled<T>(function(load_at<T>(g.gate, at, left)));
      T* out = static_cast<T*>(g.out) + row * g.width + c;
      store_stored(made * load_at<T>(g.up, at, left), out, left);
    }
}

template <typename T>
void gate_by(const Gate& g) {
  if (g.function == 0) gate<T, silu>(g);
  else gate<T, gelu_tanh>(g);
}

template <typename T>
void spread_of(int64_t size, const T* x, T* out) {
  std::vector<float> old(size), made(size);
  for (int64_t c = 0; c < size; c += kRows)
    store_stored(load_stored(x + c, size - c), old.data() + c, size - c);
  for (int64_t step = 1; step < size; step *= 2) {
    for (int64_t at = 0; at < size; at += 2 * step)
      for (int64_t c = at; c < at + step; ++c) {
        made[c] = old[c] + old[c + step];
        made[c + step] = old[c] - old[c + step];
      }
    old.swap(made);
  }
  const Vec root = splat(static_cast<float>(std::sqrt(static_cast<double>(size))));
  for (int64_t c = 0; c < size; c += kRows)
    store_stored(load_stored(old.data() + c, size - c) / root, out + c, size - c);
}

template <typename T>
void spread(const Spread& s) {
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t part = 0; part < s.dim; part += s.size)
        spread_of(s.size, s.x.at<const T>(row, head) + part, s.out.at<T>(row, head) + part);
}

template <typename T>
void gather(const Gather& g) {
  for (int64_t row = 0; row < g.rows; ++row) {
    const T* from = static_cast<const T*>(g.from) + g.index[row] * g.width;
    for (int64_t c = 0; c < g.width; c += kRows) {
      const int64_t left = g.width - c;
      store_stored(load_stored(from + c, left) * g.factor, g.out + row * g.width + c, left);
    }
  }
}

}  // namespace

extern "C" void rms_norm(const RmsNorm* n) {
  if (n->kind == kFloat32) norm<float>(*n);
  else if (n->kind == kBFloat16) norm<BFloat16>(*n);
  else norm<Float16>(*n);
}

extern "C" void rotate_heads(const Rotate* r) {
  if (r->kind == kFloat32) turn<float>(*r);
  else if (r->kind == kBFloat16) turn<BFloat16>(*r);
  else turn<Float16>(*r);
}

extern "C" void gate_rows(const Gate* g) {
  if (g->kind == kFloat32) gate_by<float>(*g);
  else if (g->kind == kBFloat16) gate_by<BFloat16>(*g);
  else gate_by<Float16>(*g);
}

extern "C" void spread_heads(const Spread* s) {
  if (s->kind == kFloat32) spread<float>(*s);
  else if (s->kind == kBFloat16) spread<BFloat16>(*s);
  else spread<Float16>(*s);
}

extern "C" void gather_rows(const Gather* g) {
  if (g->kind == kFloat32) gather<float>(*g);
  else if (g->kind == kBFloat16) gather<BFloat16>(*g);
  else gather<Float16>(*g);
}

extern "C" void add_rows(const Add* a) {
  for (int64_t i = 0; i < a->rows * a->width; ++i) a->out[i] = a->x[i] + a->other[i];
}
