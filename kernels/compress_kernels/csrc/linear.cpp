// Rows times a weight that lies as checkpoints have it, [outputs, columns], in fp32.
//
// Small tiles of rows and outputs, summed along the columns in 16 lanes: nothing is packed, so a
// weight is read once for a few rows, which is what a step of few tokens costs. A row's sums are in
// one order, whatever rows are beside it.

#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "tile.h"

// Mirrored in cpu/linear.py.
struct Linear {
  const float* x;       // [rows, columns], rows `stride` apart
  const float* weight;  // [outputs, columns]
  const float* bias;    // [outputs] or null
  float* out;           // [rows, outputs], rows `out_stride` apart
  int64_t rows, columns, outputs, stride, out_stride;
  int32_t threads;
};

namespace {

constexpr int kHigh = 4;             // rows of a tile
constexpr int kWide = 4;             // outputs of a tile
constexpr int64_t kKept = 48 << 10;  // numbers of rows that stay in the second-level cache
constexpr int64_t kGrain = 4 << 20;  // products worth a thread

inline Vec load_part(const float* from, int64_t left) {
  Vec x{};
  if (left >= kRows) std::memcpy(&x, from, sizeof x);
  else std::memcpy(&x, from, left * sizeof(float));
  return x;
}

// Rows and outputs beyond the last are the last again, and not written.
void tile(const Linear& l, int64_t row, int64_t output) {
  const float *x[kHigh], *w[kWide];
  for (int i = 0; i < kHigh; ++i) x[i] = l.x + std::min(row + i, l.rows - 1) * l.stride;
  for (int j = 0; j < kWide; ++j)
    w[j] = l.weight + std::min(output + j, l.outputs - 1) * l.columns;
  Vec sums[kHigh * kWide] = {};
  const int64_t whole = l.columns / kRows * kRows;
  for (int64_t c = 0; c < whole; c += kRows) {
    Vec b[kWide];
#pragma GCC unroll 4
    for (int j = 0; j < kWide; ++j) std::memcpy(&b[j], w[j] + c, sizeof(Vec));
#pragma GCC unroll 4
    for (int i = 0; i < kHigh; ++i) {
      Vec a;
      std::memcpy(&a, x[i] + c, sizeof(Vec));
#pragma GCC unroll 4
      for (int j = 0; j < kWide; ++j) sums[i * kWide + j] += a * b[j];
    }
  }
  if (whole < l.columns)
    for (int i = 0; i < kHigh; ++i)
      for (int j = 0; j < kWide; ++j)
        sums[i * kWide + j] += load_part(x[i] + whole, l.columns - whole) *
                               load_part(w[j] + whole, l.columns - whole);
  transpose(sums);
  for (int i = 0; i < 8; ++i) sums[i] += sums[i + 8];
  for (int i = 0; i < 4; ++i) sums[i] += sums[i + 4];
  const Vec total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int i = 0; i < kHigh && row + i < l.rows; ++i)
    for (int j = 0; j < kWide && output + j < l.outputs; ++j)
      l.out[(row + i) * l.out_stride + output + j] =
          total[i * kWide + j] + (l.bias ? l.bias[output + j] : 0.0f);
}

}  // namespace

extern "C" void linear_rows(const Linear* l) {
  const int64_t strip = std::max<int64_t>(kHigh, kKept / l->columns / kHigh * kHigh);
  const int64_t groups = (l->outputs + kWide - 1) / kWide;
  const int64_t grain = 1 + kGrain / (l->rows * l->columns * kWide + 1);
  in_parallel(l->threads, groups, grain, [&](int64_t from, int64_t to) {
    for (int64_t first = 0; first < l->rows; first += strip)
      for (int64_t group = from; group < to; ++group)
        for (int64_t row = first; row < std::min(first + strip, l->rows); row += kHigh)
          tile(*l, row, group * kWide);
  });
}
