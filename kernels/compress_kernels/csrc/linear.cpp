// Rows times a weight that lies as checkpoints have it, [outputs, columns], in fp32.
//
// Small tiles of rows and outputs, summed along the columns in kRows lanes: nothing is packed, so a
// weight is read once for a few rows, which is what a step of few tokens costs. A row's sums are in
// one order, whatever rows are beside it.

#include <cstdint>
#include <cstring>

#include "linear.h"
#include "parallel.h"
#include "tile.h"

namespace {

constexpr int kSums = kRows;         // of a tile: rows times outputs
constexpr int kHigh = 4;             // rows of a tile, where there are as many
constexpr int64_t kKept = 48 << 10;  // numbers of rows that stay in the second-level cache
constexpr int64_t kAhead = 16 << 10;  // bytes of a weight
constexpr int64_t kGrain = 4 << 20;  // products worth a thread

inline Vec load_part(const float* from, int64_t left) {
  Vec x{};
  if (left >= kRows) std::memcpy(&x, from, sizeof x);
  else std::memcpy(&x, from, left * sizeof(float));
  return x;
}

// Into a register, once: GCC would read it anew for every product.
typedef float Loose __attribute__((vector_size(sizeof(Vec)), aligned(4), may_alias));
inline Vec load_once(const float* from) { return *reinterpret_cast<const volatile Loose*>(from); }

// Outputs beyond the last are the last again, and not written. Whoever reads a weight first asks
// for what is read next: a processor that looks ahead by itself stops at the end of a page.
template <int kHeight, bool kFirst>
void tile(const Linear& l, int64_t row, int64_t output) {
  constexpr int kWidth = kSums / kHeight;
  const float *x[kHeight], *w[kWidth];
  for (int i = 0; i < kHeight; ++i) x[i] = l.x + (row + i) * l.stride;
  for (int j = 0; j < kWidth; ++j)
    w[j] = l.weight + std::min(output + j, l.outputs - 1) * l.columns;
  Vec sums[kSums] = {};
  const int64_t whole = l.columns / kRows * kRows;
  for (int64_t c = 0; c < whole; c += kRows) {
    Vec a[kHeight];
#pragma GCC unroll 4
    for (int i = 0; i < kHeight; ++i) a[i] = load_once(x[i] + c);
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) {
      if (kFirst) __builtin_prefetch(reinterpret_cast<const char*>(w[j] + c) + kAhead);
      const Vec b = load_once(w[j] + c);
#pragma GCC unroll 4
      for (int i = 0; i < kHeight; ++i) sums[i * kWidth + j] += a[i] * b;
    }
  }
  if (whole < l.columns)
    for (int i = 0; i < kHeight; ++i)
      for (int j = 0; j < kWidth; ++j)
        sums[i * kWidth + j] += load_part(x[i] + whole, l.columns - whole) *
                                load_part(w[j] + whole, l.columns - whole);
  const Vec total = totals(sums);
  const int64_t width = std::min<int64_t>(kWidth, l.outputs - output);
  for (int i = 0; i < kHeight; ++i)
    for (int j = 0; j < width; ++j)
      l.out[(row + i) * l.out_stride + output + j] =
          total[i * kWidth + j] + (l.bias ? l.bias[output + j] : 0.0f);
}

// A few rows, and kSums outputs.
template <int kHeight>
void flat(const Linear& l, int64_t row, int64_t output) {
  for (int64_t j = output; j < std::min(output + kSums, l.outputs); j += kSums / kHeight)
    tile<kHeight, true>(l, row, j);
}

// Rows [from, to), and kSums outputs.
void group(const Linear& l, int64_t from, int64_t to, int64_t output) {
  const int64_t high = from + (to - from) / kHigh * kHigh;
  for (int64_t j = output; j < std::min(output + kSums, l.outputs); j += kSums / kHigh)
    for (int64_t row = from; row < high; row += kHigh)
      row == from ? tile<kHigh, true>(l, row, j) : tile<kHigh, false>(l, row, j);
  if ((to - high) & 2) flat<2>(l, high, output);
  if ((to - high) & 1) flat<1>(l, to - 1, output);
}

}  // namespace

extern "C" void linear_rows(const Linear* l) {
  const int64_t strip = std::max<int64_t>(kHigh, kKept / l->columns / kHigh * kHigh);
  const int64_t groups = (l->outputs + kSums - 1) / kSums;
  const int64_t grain = 1 + kGrain / (l->rows * l->columns * kSums + 1);
  in_parallel(l->threads, groups, grain, [&](int64_t from, int64_t to) {
    for (int64_t first = 0; first < l->rows; first += strip)
      for (int64_t i = from; i < to; ++i)
        group(*l, first, std::min(first + strip, l->rows), i * kSums);
  });
}
