// Weights of a run of scores, and the sum of two runs: what a softmax needs that is cut in runs.

#pragma once

#include "stored.h"

namespace paged {

// What a run, or several, add up to: the sum of weights, which are powers of e over the largest
// score, and that score. The values times these weights lie beside it.
struct RunSum {
  float top, weights;
};

// What is taken off scores: an infinity off itself would be no number.
inline float base_of(float top) { return top == -__builtin_inff() ? 0.0f : top; }

// The larger, and NaN if one is.
inline float larger(float a, float b) { return b > a || b != b ? b : a; }

// The lanes of a vector in one number, half on half.
template <typename Join>
inline float lanes_in_one(Vec x, const Join& join) {
  float lanes[kRows];
  std::memcpy(lanes, &x, sizeof x);
#pragma GCC unroll 4
  for (int half = kRows / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = join(lanes[i], lanes[i + half]);
  return lanes[0];
}

// From products with keys to weights of positions [from, to) of a run, in place; around them up to
// whole vectors is anything. key_scales, value_scales: of the positions, null for none; the sum is
// without those of values, the weights that are left behind are with them. cap: 0 for none.
inline RunSum soften(float* scores, int from, int to, float scale, float cap,
                     const float* key_scales, const float* value_scales) {
  constexpr float kLowest = -__builtin_inff();
  const int begin = from / kRows * kRows;
  Vec tops = splat(kLowest);
  Vec place;
  for (int i = 0; i < kRows; ++i) place[i] = static_cast<float>(begin + i);
  for (int p = begin; p < to; p += kRows, place += static_cast<float>(kRows)) {
    Vec x, s;
    std::memcpy(&x, scores + p, sizeof x);
    if (key_scales) std::memcpy(&s, key_scales + p, sizeof s), x *= s;
    x *= splat(scale);
    if (cap != 0.0f) x = hyperbolic_tangent(x / splat(cap)) * splat(cap);
    if (p < from) x = place < splat(static_cast<float>(from)) ? splat(kLowest) : x;
    if (p + kRows > to) x = place < splat(static_cast<float>(to)) ? x : splat(kLowest);
    tops = (x > tops) | (x != x) ? x : tops;
    std::memcpy(scores + p, &x, sizeof x);
  }
  const float top = lanes_in_one(tops, larger);
  const Vec base = splat(base_of(top));
  Vec sums{};
  for (int p = begin; p < to; p += kRows) {
    Vec x, s;
    std::memcpy(&x, scores + p, sizeof x);
    x = exponential(x - base);
    sums += x;
    if (value_scales) std::memcpy(&s, value_scales + p, sizeof s), x *= s;
    std::memcpy(scores + p, &x, sizeof x);
  }
  return {top, lanes_in_one(sums, [](float a, float b) { return a + b; })};
}

inline float power(float x) { return exponential(splat(x))[0]; }

// Adds a later run to the ones before it. Values: `wide` numbers, whole vectors.
__attribute__((noinline)) inline void merge(RunSum& sum, float* values, const RunSum& run,
                                            const float* its_values, int64_t wide) {
  const float top = larger(sum.top, run.top), base = base_of(top);
  const Vec kept = splat(power(sum.top - base)), added = splat(power(run.top - base));
  sum.weights = sum.weights * kept[0] + run.weights * added[0];
  sum.top = top;
  for (int64_t c = 0; c < wide; c += kRows) {
    Vec x, y;
    std::memcpy(&x, values + c, sizeof x);
    std::memcpy(&y, its_values + c, sizeof y);
    x = x * kept + y * added;
    std::memcpy(values + c, &x, sizeof x);
  }
}

}  // namespace paged
