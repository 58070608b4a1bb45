// Tiles of kRows rows, transposed: [column][kRows rows], one vector a column.
//
// Vector types are the compilers' own (GCC, Clang): AVX-512, AVX2 or NEON follow from -march. A
// vector is as wide as a register: GCC keeps a wider one in memory, and a product of 32 rows with
// 1024 outputs took 16 times as long on AVX2.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int kRows = 16;
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define WHOLE 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define FIRST_HALF 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define LAST_HALF 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define FIRST_QUARTER 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define LAST_QUARTER 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
constexpr int kRows = 8;
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define WHOLE 0, 1, 2, 3, 4, 5, 6, 7
#define FIRST_HALF 0, 1, 2, 3, 8, 9, 10, 11
#define LAST_HALF 4, 5, 6, 7, 12, 13, 14, 15
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif
typedef float Vec __attribute__((vector_size(kRows * sizeof(float))));

// a * b + c, rounded once in tiles of every height: left to itself, GCC avoids it in some chains, by
// their shape, where it takes a processor to be faster without.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Vec splat(float x) { return x - Vec{}; }

// As many perfect shuffles of kRows vectors as kRows has bits transpose them.
inline void transpose(Vec* m) {
  Vec half[kRows];
  for (int round = 1; round < kRows; round *= 2) {
    for (int i = 0; i < kRows / 2; ++i) {
      half[2 * i] = __builtin_shufflevector(m[i], m[i + kRows / 2], LOW);
      half[2 * i + 1] = __builtin_shufflevector(m[i], m[i + kRows / 2], HIGH);
    }
    std::copy_n(half, kRows, m);
  }
}

// The lanes of two vectors, some of them added to the others: half as many of each are left.
#define FOLD(a, b, some, others) \
  (__builtin_shufflevector(a, b, some) + __builtin_shufflevector(a, b, others))

// What the lanes of each of kRows vectors sum up to.
inline Vec totals(const Vec* m) {
  Vec halves[kRows / 2], quarters[4], pairs[2];
  for (int i = 0; i < kRows / 2; ++i)
    halves[i] = FOLD(m[2 * i], m[2 * i + 1], FIRST_HALF, LAST_HALF);
#ifdef __AVX512F__
  for (int i = 0; i < 4; ++i)
    quarters[i] = FOLD(halves[2 * i], halves[2 * i + 1], FIRST_QUARTER, LAST_QUARTER);
#else
  std::copy_n(halves, 4, quarters);  // of 8 lanes a half has as few as a quarter of 16
#endif
  for (int i = 0; i < 2; ++i) pairs[i] = FOLD(quarters[2 * i], quarters[2 * i + 1], EVEN, ODD);
  return FOLD(pairs[0], pairs[1], EVEN, ODD);
}

// tile[c][r] = source[r][c]; rows beyond the matrix are 0.
inline void load_tile(const float* source, int64_t stride, int rows, int64_t width, Vec* tile) {
  for (int64_t c = 0; c < width; c += kRows) {
    const int64_t columns = std::min<int64_t>(kRows, width - c);
    Vec square[kRows] = {};
    for (int r = 0; r < rows; ++r) {
      const float* from = source + r * stride + c;
      if (columns == kRows) std::memcpy(&square[r], from, sizeof(Vec));
      else std::memcpy(&square[r], from, columns * sizeof(float));
    }
    transpose(square);
    std::copy_n(square, columns, tile + c);
  }
}

// out[r][c] = tile[c][r], as floats or converted to whole numbers.
template <typename Out>
void store_tile(const Vec* tile, int64_t stride, int rows, int64_t width, Out* out) {
  for (int64_t c = 0; c < width; c += kRows) {
    const int64_t columns = std::min<int64_t>(kRows, width - c);
    Vec square[kRows] = {};
    std::copy_n(tile + c, columns, square);
    transpose(square);
    for (int r = 0; r < rows; ++r) {
      Out* to = out + r * stride + c;
      if (columns == kRows) for (int i = 0; i < kRows; ++i) to[i] = static_cast<Out>(square[r][i]);
      else for (int i = 0; i < columns; ++i) to[i] = static_cast<Out>(square[r][i]);
    }
  }
}
