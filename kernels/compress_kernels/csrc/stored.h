// Numbers of the dtypes that keys and values are stored in, read as fp32; exponential and tanh.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "tile.h"
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

enum Kind { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

typedef uint32_t Words __attribute__((vector_size(kRows * 4)));
typedef uint16_t Halves __attribute__((vector_size(kRows * 2)));
typedef int8_t Bytes __attribute__((vector_size(kRows)));
typedef int32_t Integers __attribute__((vector_size(kRows * 4)));

// The first of `left` numbers, kRows at most; zeros behind them.
template <typename V, typename T>
inline V load_raw(const T* from, int64_t left) {
  V found{};
  if (left >= kRows) std::memcpy(&found, from, sizeof(V));
  else std::memcpy(&found, from, left * sizeof(T));
  return found;
}

// Small heads end in half a vector: it is filled up in a register, a copy of any length in memory.
typedef float Half __attribute__((vector_size(sizeof(Vec) / 2)));

inline Vec load_stored(const float* from, int64_t left) {
  if (left != kRows / 2) return load_raw<Vec>(from, left);
  Half half;
  std::memcpy(&half, from, sizeof half);
  return __builtin_shufflevector(half, Half{}, WHOLE);
}

inline Vec load_stored(const BFloat16* from, int64_t left) {
  const Halves raw = load_raw<Halves>(from, left);
#ifdef __AVX512F__  // GCC 12 converts halves of them, and puts these together
  const Words wide = reinterpret_cast<Words>(_mm512_cvtepu16_epi32((__m256i)raw)) << 16;
#else
  const Words wide = __builtin_convertvector(raw, Words) << 16;
#endif
  Vec x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

inline Vec load_stored(const Float16* from, int64_t left) {
#ifdef __AVX512F__
  const Halves raw = load_raw<Halves>(from, left);
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(raw));
#elif defined(__F16C__)
  const Halves raw = load_raw<Halves>(from, left);
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(raw));
#else
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
#endif
}

inline Integers ints_of(Bytes bytes) {
#if defined(__AVX512F__)  // GCC 12 converts bytes one by one
  return (Integers)_mm512_cvtepi8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (int64_t)bytes));
#else
  return __builtin_convertvector(bytes, Integers);
#endif
}

inline Vec load_stored(const int8_t* from, int64_t left) {
  return __builtin_convertvector(ints_of(load_raw<Bytes>(from, left)), Vec);
}

inline Words words(Vec x) {
  Words bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline Vec floats(Words bits) {
  Vec x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The largest magnitude, infinite or NaN where one is.
inline float largest_of(const float* x, int64_t count) {
  int32_t top = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    top = std::max(top, bits & 0x7fffffff);
  }
  float found;
  std::memcpy(&found, &top, sizeof found);
  return found;
}

inline float largest_of(const BFloat16* x, int64_t count) {
  uint32_t top = 0;
  for (int64_t i = 0; i < count; ++i) top = std::max<uint32_t>(top, x[i].bits & 0x7fff);
  top <<= 16;
  float found;
  std::memcpy(&found, &top, sizeof found);
  return found;
}

// The nearest number of a dtype, ties to even, as fp32. NaN stays NaN.
inline Vec nearest_of(Vec x, const float*) { return x; }

inline Vec nearest_of(Vec x, const BFloat16*) {
  const Words bits = words(x);
  const Vec near = floats((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
  return x == x ? near : floats(bits | 0x00400000u);
}

inline Vec nearest_of(Vec x, const Float16*) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  const Words bits = words(x), sign = bits & 0x80000000u, size = bits & 0x7fffffffu;
  const Vec large = floats((size + 0xfff + ((size >> 13) & 1)) & 0xffffe000u);
  const Vec small = (floats(size) + 0.5f) - 0.5f;  // below 2^-14: multiples of 2^-24
  Vec near = floats(size) < splat(6.103515625e-5f) ? small : large;
  near = near > splat(65504.0f) ? splat(__builtin_inff()) : near;
  return x == x ? floats(words(near) | sign) : x;
#endif
}

// The first of `left` numbers, kRows at most, written; each is one of the dtype already.
template <typename V, typename T>
inline void store_raw(const V& x, T* to, int64_t left) {
  if (left >= kRows) std::memcpy(to, &x, sizeof x);
  else std::memcpy(to, &x, left * sizeof(T));
}

inline void store_exact(Vec x, float* to, int64_t left) { store_raw(x, to, left); }

inline void store_exact(Vec x, BFloat16* to, int64_t left) {
  store_raw(__builtin_convertvector(words(x) >> 16, Halves), to, left);
}

inline Halves halves_of(Vec x) {
  const Words bits = words(x), size = bits & 0x7fffffffu;
  const Words small = __builtin_convertvector(floats(size) * splat(16777216.0f), Words);
  Words half = floats(size) < splat(6.103515625e-5f) ? small : (size - (112u << 23)) >> 13;
  half = size >= 0x7f800000u ? 0x7c00u | (size >> 13 & 0x3ff) : half;
  return __builtin_convertvector(half | (bits >> 16 & 0x8000), Halves);
}

inline void store_exact(Vec x, Float16* to, int64_t left) { store_raw(halves_of(x), to, left); }

template <typename T>
inline void store_stored(Vec x, T* to, int64_t left) {
  store_exact(nearest_of(x, to), to, left);
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
  const Integers power = (__builtin_convertvector(rounded, Integers) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < low ? Vec{} : p * scale;
}

// tanh(x), to about 2 units in the last place. NaN stays NaN.
inline Vec hyperbolic_tangent(Vec x) {
  const Vec size = floats(words(x) & 0x7fffffffu);
  const Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec small = p * z * x + x;
  const Vec twice = size > splat(20.0f) ? splat(40.0f) : size + size;
  const Vec large = 1.0f - 2.0f / (exponential(twice) + 1.0f);
  return size < splat(0.625f) ? small : floats(words(large) | (words(x) & 0x80000000u));
}
