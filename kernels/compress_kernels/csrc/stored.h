// Numbers of the dtypes that keys and values are stored in, read as fp32; and the exponential.

#pragma once

#include <cstdint>
#include <cstring>

#include "tile.h"

enum Kind { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

typedef uint32_t Words __attribute__((vector_size(kRows * 4)));
typedef uint16_t Halves __attribute__((vector_size(kRows * 2)));
typedef int8_t Bytes __attribute__((vector_size(kRows)));

// The first of `left` numbers, 16 at most; zeros behind them.
template <typename V, typename T>
inline V load_raw(const T* from, int64_t left) {
  V found{};
  if (left >= kRows) std::memcpy(&found, from, sizeof(V));
  else std::memcpy(&found, from, left * sizeof(T));
  return found;
}

inline Vec load_stored(const float* from, int64_t left) { return load_raw<Vec>(from, left); }

inline Vec load_stored(const BFloat16* from, int64_t left) {
  const Words wide = __builtin_convertvector(load_raw<Halves>(from, left), Words) << 16;
  Vec x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

inline Vec load_stored(const Float16* from, int64_t left) {
  const Words half = __builtin_convertvector(load_raw<Halves>(from, left), Words);
  Words bits = (half & 0x7fff) << 13;
  Vec x;
  std::memcpy(&x, &bits, sizeof x);
  x *= splat(5.192296858534828e33f);  // 2^112: from one bias of exponents to the other
  std::memcpy(&bits, &x, sizeof x);
  // Infinity and NaN have the largest exponent in both.
  bits |= (half & 0x8000) << 16 | ((half & 0x7c00) == 0x7c00 & 0x7f800000u);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline Vec load_stored(const int8_t* from, int64_t left) {
  return __builtin_convertvector(load_raw<Bytes>(from, left), Vec);
}

// exp(x), to about 1 unit in the last place; 0 for x below -87, x at most 88. NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec low = splat(-87.0f);
  const Vec inside = x < low ? low : x;
  const Vec rounded = (inside * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vec r = (inside - rounded * 0.693145752f) - rounded * 1.42860677e-6f;
  Vec p = splat(1.98756915e-4f);
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345205e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  typedef int32_t Integers __attribute__((vector_size(kRows * 4)));
  const Integers power = (__builtin_convertvector(rounded, Integers) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < low ? Vec{} : p * scale;
}
