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
#define OWN_HALVES(a, b) _mm512_mask_blend_ps(0xff00, a, b)
#define OTHER_HALVES 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23
#define OWN_FOURS(a, b) _mm512_mask_blend_ps(0xf0f0, a, b)
#define OTHER_FOURS 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27
#define OWN_PAIRS(a, b) _mm512_mask_blend_ps(0xcccc, a, b)
#define OTHER_PAIRS 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29
#define OWN_ONES(a, b) _mm512_mask_blend_ps(0xaaaa, a, b)
#define OTHER_ONES 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30
#else
constexpr int kRows = 8;
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define WHOLE 0, 1, 2, 3, 4, 5, 6, 7
#define OWN_HALVES(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 12, 13, 14, 15)
#define OTHER_HALVES 4, 5, 6, 7, 8, 9, 10, 11
#define OWN_PAIRS(a, b) __builtin_shufflevector(a, b, 0, 1, 10, 11, 4, 5, 14, 15)
#define OTHER_PAIRS 2, 3, 8, 9, 6, 7, 12, 13
#define OWN_ONES(a, b) __builtin_shufflevector(a, b, 0, 9, 2, 11, 4, 13, 6, 15)
#define OTHER_ONES 1, 8, 3, 10, 5, 12, 7, 14
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

// The lanes of two vectors, some of them added to the others: half as many of each are left, where
// they are of each vector's own, by a blend. Side by side they would take a second shuffle.
#define FOLD(a, b, lanes) (OWN_##lanes(a, b) + __builtin_shufflevector(a, b, OTHER_##lanes))

constexpr int kQuarter = kRows / 4;

// The first steps of `totals`, for vectors 4 apart: lanes j and j + 8, then j and j + 4.
inline Vec four_lanes(const Vec* m) {
#ifdef __AVX512F__
  const Vec low = FOLD(m[0], m[2], HALVES);
  const Vec high = FOLD(m[1], m[3], HALVES);
  return FOLD(low, high, FOURS);
#else
  return FOLD(m[0], m[1], HALVES);
#endif
}

// The last ones, lanes (0 + 1) + (2 + 3), for what is left of vectors i, i + 4, ... for i < 4.
inline Vec one_lane(Vec a, Vec b, Vec c, Vec d) {
  const Vec low = FOLD(a, b, ONES), high = FOLD(c, d, ONES);
  return FOLD(low, high, PAIRS);
}

// What the lanes of each of kRows vectors sum up to. Called, vectors would go through memory.
[[gnu::always_inline]] inline Vec totals(const Vec* m) {
  Vec left[4];
  for (int i = 0; i < 4; ++i) {
    Vec some[kQuarter];
    for (int j = 0; j < kQuarter; ++j) some[j] = m[i + 4 * j];
    left[i] = four_lanes(some);
  }
  return one_lane(left[0], left[1], left[2], left[3]);
}

// Writes what the sums of a tile, [kHigh rows, outputs], come to, of `left` outputs at most. bias: of
// these outputs, or null. Rows are written from memory: lane by lane it took as long as the sums.
template <int kHigh>
[[gnu::always_inline]] inline void store_totals(const Vec* sums, const float* bias, int64_t left,
                                                float* out, int64_t stride) {
  constexpr int kWide = kRows / kHigh;
  const Vec total = totals(sums);
  if (bias || left < kWide) {
    const int64_t width = std::min<int64_t>(kWide, left);
    for (int i = 0; i < kHigh; ++i)
      for (int j = 0; j < width; ++j)
        out[i * stride + j] = total[i * kWide + j] + (bias ? bias[j] : 0.0f);
    return;
  }
  float all[kRows];
  const Vec plus = total + Vec{};  // as beside a bias: no -0
  std::memcpy(all, &plus, sizeof all);
  for (int i = 0; i < kHigh; ++i) std::memcpy(out + i * stride, all + i * kWide, 4 * kWide);
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
