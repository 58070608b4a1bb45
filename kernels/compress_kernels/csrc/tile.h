// Tiles of 16 rows, transposed: [column][16 rows], one vector a column.
//
// Vector types are the compilers' own (GCC, Clang): AVX-512, AVX2 or NEON follow from -march.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int kRows = 16;
typedef float Vec __attribute__((vector_size(kRows * sizeof(float))));

inline Vec splat(float x) { return x - Vec{}; }

#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

// Four perfect shuffles of 16 vectors transpose them.
inline void transpose(Vec* m) {
  Vec half[kRows];
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < kRows / 2; ++i) {
      half[2 * i] = __builtin_shufflevector(m[i], m[i + kRows / 2], LOW);
      half[2 * i + 1] = __builtin_shufflevector(m[i], m[i + kRows / 2], HIGH);
    }
    std::copy_n(half, kRows, m);
  }
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
