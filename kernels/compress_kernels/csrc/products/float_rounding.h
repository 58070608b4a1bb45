// Rows rounded to E4M3 numbers, as tiles of products with such codes read them.

#pragma once

#include <cstring>
#include <vector>

#include "e4m3.h"
#include "panels.h"
#include "row_tiles.h"

constexpr int kTall = kRows == 16 ? 8 : 4;  // rows of a tile at most: its sums stay in registers

// Those of a tile lie together, [4 columns][row][2 pairs of bf16]: columns 0 and 2 in the lower and
// upper half of a pair, then 1 and 3.
struct RoundedFloats {
  int64_t run, places, runs;    // columns of a sum; columns with the padding; runs of a row
  int64_t first, count;         // rows
  std::vector<uint32_t> pairs;  // [rows, places / 2]
  std::vector<float> scales;    // [rows, runs]
};

// What a number of a group is worth; NaN where the group has one, or infinity that is not clipped.
inline float worth_of(const Packed& p, const float* x, int64_t count) {
  if (p.rounding == kFixedFloats) {
    bool number = true;
    for (int64_t i = 0; i < count; ++i) number &= x[i] == x[i];
    return number ? p.fixed : __builtin_nanf("");
  }
  const float top = largest_of(x, count);
  if (!(top < __builtin_inff())) return __builtin_nanf("");
  const float worth = top / p.largest;
  return worth == 0 ? 0x1p-23f : worth;
}

// x: a group, [count], of whole fours of columns -> pairs, `apart` from four to four.
inline void round_floats(const float* x, int64_t count, float worth, uint32_t* to, int64_t apart) {
  const bool none = !(worth < __builtin_inff());
  for (int64_t c = 0; c < count; c += kRows) {
    Vec code = load_raw<Vec>(x + c, std::min<int64_t>(kRows, count - c)) / worth;
    code = code < splat(-448.0f) ? splat(-448.0f) : code;
    code = code > splat(448.0f) ? splat(448.0f) : code;
    const Words bits = none ? Words{} : words(nearest_e4m3(code));
    uint32_t all[kRows];
    std::memcpy(all, &bits, sizeof all);
    for (int i = 0; i < kRows && c + i < count; i += 4, to += apart) {
      to[0] = all[i] >> 16 | (all[i + 2] & 0xffff0000u);
      to[1] = all[i + 1] >> 16 | (all[i + 3] & 0xffff0000u);
    }
  }
}

// One row, in place `index` of a tile of `high` rows that begins at `pairs`. x: with the padding.
inline void round_float_row(const Packed& p, const float* x, RoundedFloats& into, int64_t row,
                            int index, int high, uint32_t* pairs) {
  const int64_t apart = 2 * high;
  for (int64_t begin = 0; begin < p.inputs; begin += p.input_group) {
    const int64_t next = begin + p.input_group, end = next < p.inputs ? next : into.places;
    const float worth = worth_of(p, x + begin, end - begin);
    round_floats(x + begin, end - begin, worth, pairs + (begin / 4 * high + index) * 2, apart);
    for (int64_t r = begin / into.run; r * into.run < end; ++r)
      into.scales[row * into.runs + r] = worth;
  }
}

// Columns beyond the last are 0.
inline void round_float_rows(const Packed& p, RoundedFloats& into) {
  into.pairs.resize(into.count * into.places / 2);
  into.scales.resize(into.count * into.runs);
  in_row_tiles<kTall>(p, into.first, into.count, into.places,
                      [&](const float* x, int64_t row, int index, int high) {
    round_float_row(p, x, into, row, index, high,
                    into.pairs.data() + (row - index) * into.places / 2);
  });
}
