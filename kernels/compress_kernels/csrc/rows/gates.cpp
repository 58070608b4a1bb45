// Activations, and what they gate; see rows.h.

#include <cstdint>

#include "rows.h"

// Mirrored in cpu/rows.py.
struct Gate {
  const void* gate;  // [rows, width], rows `stride` apart
  const void* up;    // as gate, or null: nothing is gated
  void* out;         // [rows, width]
  int64_t rows, width, stride;
  int32_t function, kind, threads;  // function: its place in kFunctions
};

namespace {

inline Vec at_most(Vec x, float limit) { return x > splat(limit) ? splat(limit) : x; }

inline Vec silu(Vec x) { return x / (exponential(at_most(-x, 87.0f)) + 1.0f); }

inline Vec gelu_tanh(Vec x) {
  const Vec inner = 0.7978845608f * (x + 0.044715f * (x * x * x));
  return x / (exponential(at_most(-2.0f * inner, 87.0f)) + 1.0f);
}

// erf(x), to about 1 unit in the last place. NaN stays NaN.
inline Vec error_function(Vec x) {
  const Vec size = floats(words(x) & 0x7fffffffu), z = x * x;
  Vec p = splat(-5.96761703e-4f);
  p = p * z + 4.99119423e-3f;
  p = p * z - 2.67681349e-2f;
  p = p * z + 1.12819925e-1f;
  p = p * z - 3.76125336e-1f;
  p = p * z + 1.28379166e-1f;
  const Vec small = p * x + x;
  const Vec t = at_most(size, 4.0f);  // from where on it is 1
  Vec q = -1.72853470e-5f * t + 3.83197126e-4f;
  q = q * (t * t) + (-3.88396438e-3f * t + 2.42546219e-2f);
  q = q * t - 1.06777877e-1f;
  q = q * t - 6.34846687e-1f;
  q = q * t - 1.28717512e-1f;
  const Vec large = 1.0f - exponential(q * t - t);
  return size < splat(0.927734375f) ? small : floats(words(large) | (words(x) & 0x80000000u));
}

inline Vec gelu(Vec x) { return 0.5f * x * (error_function(x * 0.7071067812f) + 1.0f); }

inline Vec quick_gelu(Vec x) { return x / (exponential(at_most(-1.702f * x, 87.0f)) + 1.0f); }

inline Vec relu(Vec x) { return x < Vec{} ? Vec{} : x; }

inline Vec relu2(Vec x) { return relu(x) * relu(x); }

inline Vec sigmoid(Vec x) { return 1.0f / (exponential(at_most(-x, 87.0f)) + 1.0f); }

inline Vec linear(Vec x) { return x; }

template <typename T, Vec (*function)(Vec)>
void gate(const Gate& g) {
  row_by_row(g.threads, g.rows, g.width, [&](int64_t row) {
    for (int64_t c = 0; c < g.width; c += kRows) {
      const int64_t at = row * g.stride + c, left = g.width - c;
      const Vec made = settled<T>(function(load_at<T>(g.gate, at, left)));
      T* out = static_cast<T*>(g.out) + row * g.width + c;
      store_stored(g.up ? made * load_at<T>(g.up, at, left) : made, out, left);
    }
  });
}

template <typename T>
void gate_by(const Gate& g) {
  constexpr void (*kFunctions[])(const Gate&) = {
      gate<T, silu>, gate<T, gelu_tanh>, gate<T, gelu>,
      gate<T, quick_gelu>, gate<T, relu>, gate<T, relu2>,
      gate<T, sigmoid>, gate<T, hyperbolic_tangent>, gate<T, linear>,
  };
  kFunctions[g.function](g);
}

}  // namespace

extern "C" void gate_rows(const Gate* g) {
  if (g->kind == kFloat32) gate_by<float>(*g);
  else if (g->kind == kBFloat16) gate_by<BFloat16>(*g);
  else gate_by<Float16>(*g);
}
