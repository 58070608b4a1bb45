// Rows of x where products of linear.cpp read them in order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear.h"
#include "parallel.h"
#include "stored.h"

constexpr int kHigh = 4;  // rows of a tile, where there are as many

template <int kHeight>
struct High { static constexpr int rows = kHeight; };

// Rows go through tiles of four, then of two, then of one. body(height, first row, tiles).
template <typename Body>
void by_height(int64_t row, int64_t end, const Body& body) {
  const int64_t fours = (end - row) / kHigh, high = row + fours * kHigh;
  if (fours) body(High<kHigh>{}, row, fours);
  if ((end - high) & 2) body(High<2>{}, high, 1);
  if ((end - high) & 1) body(High<1>{}, end - 1, 1);
}

// Rows as tiles read them: block of columns by block, of each tile [columns / kRows, height, kRows].
// A row's columns are filled up with zeros.
struct LaidOut {
  float* x;
  int64_t first, rows, wide, block;  // first: of all rows. wide: numbers of a row
  float* tile(int64_t row, int64_t column) const {
    return x + column * rows + row * std::min(block, wide - column);
  }
};

inline void lay_out_tile(const Linear& l, const LaidOut& laid, int64_t row, int height) {
  for (int64_t b = 0; b < l.columns; b += laid.block) {
    float* to = laid.tile(row, b);
    for (int64_t c = b; c < std::min(b + laid.block, l.columns); c += kRows)
      for (int i = 0; i < height; ++i, to += kRows) {
        const float* from = l.x + (laid.first + row + i) * l.stride + c;
        store_raw(load_raw<Vec>(from, l.columns - c), to, kRows);
      }
  }
}

inline LaidOut lay_out(const Linear& l, int64_t first, int64_t rows, int64_t block,
                std::vector<float>& room) {
  const int64_t wide = (l.columns + kRows - 1) / kRows * kRows;
  if (static_cast<int64_t>(room.size()) < rows * wide + kRows) room.resize(rows * wide + kRows);
  const int64_t over = reinterpret_cast<uintptr_t>(room.data()) / sizeof(float) % kRows;
  const LaidOut laid{room.data() + (over ? kRows - over : 0), first, rows, wide, block};
  by_height(0, rows, [&](auto height, int64_t row, int64_t count) {
    const int64_t grain = rows_worth_a_thread(height.rows * wide);
    in_parallel(l.threads, count, grain, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        lay_out_tile(l, laid, row + i * height.rows, height.rows);
    });
  });
  return laid;
}
