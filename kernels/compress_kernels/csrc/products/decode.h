// Codes in panels of the layout "rows" as numbers in memory.

#pragma once

#include <algorithm>
#include <cstring>

#include "direct.h"

constexpr int kBlock = 512;  // columns that are decoded of one output after the other

// Grids of the steps of some columns, those that share a group once.
struct BlockGrids {
  Grid grids[kBlock / kStep];
  int of[kBlock / kStep];

  void read(const Packed& p, int64_t panel, int64_t from, int64_t to) {
    int64_t group = -1;
    int count = 0;
    for (int64_t k = from; k < to; k += kStep) {
      if (k / p.group != group) grids[count++].read(p, panel, group = k / p.group);
      of[(k - from) / kStep] = count - 1;
    }
  }
};

// 16 numbers, step j of an output's line, as T.
template <int kPlain, typename Numbers, typename T>
inline void decode_step(const uint8_t* line, int j, const Numbers& numbers, T* to) {
  for (int part = 0; part < kParts; ++part, to += kRows) {
    Ints packed;
    std::memcpy(&packed, line + 4 * kRows * part, sizeof packed);
    const Vec x = numbers.at(packed, j);
    if constexpr (std::is_same_v<T, Plain<kPlain>>) store_exact(x, to, kRows);
    else store_stored(x, to, kRows);
  }
}

// Numbers [first, last) of 16 outputs, rows `stride` apart; first is a multiple of kBlock. Where
// columns are permuted they are all, and each goes to the place that it has in x. They are rounded
// to the dtype of the weight, then to T.
template <int kBits, int kCodes, int kPlain, typename Numbers = Values<kBits, kCodes, kPlain>,
          typename T>
void decode(const Packed& p, int64_t panel, int64_t first, int64_t last, T* to, int64_t stride) {
  constexpr int64_t kWide = 512 / kBits, kLast = kWide / kStep - 1;
  const uint8_t* codes = p.codes + panel * p.panel_bytes;
  BlockGrids block;
  for (int64_t from = first; from < last; from += kBlock) {
    const int64_t end = std::min<int64_t>(from + kBlock, last);
    block.read(p, panel, from, end);
    for (int r = 0; r < kPanel; ++r) {
      Numbers numbers;
      int grid = -1;
      T* row = to + r * stride;
      for (int64_t k = from; k < end; k += kStep) {
        const uint8_t* line = codes + (k / kWide * kPanel + r) * kLine;
        const int* of = block.of + (k - from) / kStep;
        if (*of != grid) numbers.read(p, block.grids[grid = *of], r);
        if (!p.columns && k % kWide == 0 && end - k >= kWide && of[kLast] == grid) {
#pragma GCC unroll 16
          for (int j = 0; j <= kLast; ++j)
            decode_step<kPlain>(line, j, numbers, row + k - first + kStep * j);
          k += kStep * kLast;
          continue;
        }
        T found[kStep];
        decode_step<kPlain>(line, k % kWide / kStep, numbers, found);
        const int64_t left = std::min<int64_t>(kStep, end - k);
        if (p.columns) for (int64_t i = 0; i < left; ++i) row[p.columns[k + i]] = found[i];
        else if (left == kStep) std::memcpy(row + k - first, found, sizeof found);
        else std::memcpy(row + k - first, found, left * sizeof *found);
      }
    }
  }
}
