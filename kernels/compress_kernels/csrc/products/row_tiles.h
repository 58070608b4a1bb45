// Rows of x a tile after the other, for those who round them.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "panels.h"
#include "parallel.h"

// body(x, row, index, high): of rows [first, first + count) of p row by row, `row` from 0 on, which
// is the index-th of a tile of `high`, kMost at most. x: its numbers in their places, with zeros
// behind the last; body may write there.
template <int kMost, typename Body>
void in_row_tiles(const Packed& p, int64_t first, int64_t count, int64_t places,
                  const Body& body) {
  const int64_t tiles = (count + kMost - 1) / kMost;
  const int64_t grain = rows_worth_a_thread(kMost * places);
  in_parallel(p.threads, tiles, grain, [&](int64_t from, int64_t to) {
    std::vector<float> padded(places);
    const int64_t stop = std::min(to * kMost, count);
    for (int64_t row = from * kMost; row < stop;) {
      const int high = height<kMost>(count - row);
      for (int i = 0; i < high; ++i) {
        const float* x = p.x + (first + row + i) * p.stride;
        if (p.columns) for (int64_t k = 0; k < p.inputs; ++k) padded[k] = x[p.columns[k]];
        else std::memcpy(padded.data(), x, p.inputs * sizeof(float));
        body(padded.data(), row + i, i, high);
      }
      row += high;
    }
  });
}
