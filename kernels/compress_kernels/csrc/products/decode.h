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

// 16 numbers, step j of an output's line, which are numbers of T.
template <typename Numbers, typename T>
inline void decode_step(const uint8_t* line, int j, const Numbers& numbers, T* to) {
  for (int part = 0; part < kParts; ++part, to += kRows) {
    Ints packed;
    std::memcpy(&packed, line + 4 * kRows * part, sizeof packed);
    store_exact(numbers.at(packed, j), to, kRows);
  }
}

// The numbers of a panel: to: [16 outputs, inputs], each column where it is in x.
template <int kBits, int kPlain, typename Numbers>
void decode(const Packed& p, int64_t panel, Plain<kPlain>* to) {
  using T = Plain<kPlain>;
  constexpr int64_t kWide = 512 / kBits, kLast = kWide / kStep - 1;
  const uint8_t* codes = p.codes + panel * p.panel_bytes;
  BlockGrids block;
  for (int64_t from = 0; from < p.inputs; from += kBlock) {
    const int64_t end = std::min<int64_t>(from + kBlock, p.inputs);
    block.read(p, panel, from, end);
    for (int r = 0; r < kPanel; ++r) {
      Numbers numbers;
      int grid = -1;
      T* row = to + r * p.inputs;
      for (int64_t k = from; k < end; k += kStep) {
        const uint8_t* line = codes + (k / kWide * kPanel + r) * kLine;
        const int* of = block.of + (k - from) / kStep;
        if (*of != grid) numbers.read(p, block.grids[grid = *of], r);
        if (!p.columns && k % kWide == 0 && end - k >= kWide && of[kLast] == grid) {
#pragma GCC unroll 16
          for (int j = 0; j <= kLast; ++j) decode_step(line, j, numbers, row + k + kStep * j);
          k += kStep * kLast;
          continue;
        }
        T found[kStep];
        decode_step(line, k % kWide / kStep, numbers, found);
        const int64_t left = std::min<int64_t>(kStep, end - k);
        if (p.columns) for (int64_t i = 0; i < left; ++i) row[p.columns[k + i]] = found[i];
        else if (left == kStep) std::memcpy(row + k, found, sizeof found);
        else std::memcpy(row + k, found, left * sizeof *found);
      }
    }
  }
}
