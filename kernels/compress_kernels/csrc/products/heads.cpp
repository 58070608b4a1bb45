// Rows of several heads, each times a weight of its own that lies as [columns, outputs].
//
// A head multiplies little, 32 columns or 32 outputs of a small model: summed in lanes along the
// columns, as linear.cpp has it, adding lanes up took longer than the products, and a call a head
// as long again. Here outputs lie in lanes, and the weights of all heads in one stream.
//
// An output is a sum of blocks of columns, in their order, each summed by itself: a row's bits are
// the same in tiles of every shape, and the blocks of one row, where nothing else is to be done
// while a sum waits for itself, go side by side.

#include <cstdint>

#include "laid_out.h"
#include "parallel.h"
#include "stored.h"
#include "tile.h"

namespace {

// Mirrored in cpu/linear.py.
struct HeadProducts {
  const float* x;      // [rows, heads, columns], rows `stride` apart, heads `head_stride`
  const void* weight;  // [heads, columns, wide] of `kind`
  float* out;          // [rows, heads, outputs], rows `out_stride` apart, heads `out_head_stride`
  int64_t rows, heads, columns, outputs, wide;  // wide: a multiple of 16
  int64_t stride, head_stride, out_stride, out_head_stride;
  int32_t kind, threads;
};

constexpr int64_t kBlock = 32;           // columns
constexpr int kSums = kRows;             // of a tile, in half of the registers
constexpr int64_t kAhead = 16 << 10;     // bytes of weights, asked for into the second-level cache
constexpr int64_t kNear = 32;            // rows: one may be a page, and all heads go over it

// Adds kSide blocks of columns from c on, `count` columns each, to the totals of kHeight rows and
// kWide vectors of outputs.
template <int kHeight, int kWide, int kSide, bool kAsk, typename T>
inline void add_blocks(const HeadProducts& h, const float* x, const T* w, int64_t c, int64_t count,
                       Vec* totals) {
  constexpr int kEach = kHeight * kWide;
  Vec sums[kSide * kEach] = {};
  for (int64_t k = c; k < c + count; ++k) {
#pragma GCC unroll 8
    for (int s = 0; s < kSide; ++s) {
      const int64_t column = k + s * kBlock;
      const T* from = w + column * h.wide;
      if (kAsk)
        for (int64_t i = 0; i < kWide * kRows * int64_t{sizeof(T)}; i += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead + i, 0, 2);
      Vec b[kWide];
#pragma GCC unroll 8
      for (int j = 0; j < kWide; ++j) b[j] = load_stored(from + j * kRows, kRows);
#pragma GCC unroll 4
      for (int i = 0; i < kHeight; ++i) {
        const Vec a = splat(x[i * h.stride + column]);
#pragma GCC unroll 8
        for (int j = 0; j < kWide; ++j) {
          Vec& sum = sums[s * kEach + i * kWide + j];
          sum = fused(a, b[j], sum);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSide * kEach; ++i) totals[i % kEach] += sums[i];
}

template <int kHeight, int kWide, bool kAsk, typename T>
void tile(const HeadProducts& h, const float* x, const T* w, int64_t left, float* out) {
  constexpr int kMost = kSums / 2 / (kHeight * kWide);  // blocks side by side
  Vec totals[kHeight * kWide];
#pragma GCC unroll 16
  for (int i = 0; i < kHeight * kWide; ++i) totals[i] = Vec{};  // in registers
  const int64_t whole = h.columns / kBlock * kBlock;
  int64_t c = 0;
  if constexpr (kMost >= 4)
    for (; whole - c >= 4 * kBlock; c += 4 * kBlock)
      add_blocks<kHeight, kWide, 4, kAsk>(h, x, w, c, kBlock, totals);
  if constexpr (kMost >= 2)
    for (; whole - c >= 2 * kBlock; c += 2 * kBlock)
      add_blocks<kHeight, kWide, 2, kAsk>(h, x, w, c, kBlock, totals);
  for (; c < h.columns; c += kBlock)
    add_blocks<kHeight, kWide, 1, kAsk>(h, x, w, c, std::min(kBlock, h.columns - c), totals);
  const auto write = [&](int i, int64_t count) {
    store_raw(totals[i], out + i / kWide * h.out_stride + i % kWide * kRows, count);
  };
#pragma GCC unroll 16
  for (int i = 0; i < kHeight * kWide; ++i)
    if (left >= kWide * kRows) write(i, kRows);
    else if (left > i % kWide * kRows) write(i, left - i % kWide * kRows);
}

// All outputs of kHeight rows of a head.
template <int kHeight, bool kAsk, typename T>
void outputs_of(const HeadProducts& h, const float* x, const T* w, float* out) {
  int64_t j = 0;
  const auto tiles = [&](auto wide) {
    constexpr int kWide = decltype(wide)::rows;
    for (; h.wide - j >= kWide * kRows; j += kWide * kRows)
      tile<kHeight, kWide, kAsk>(h, x, w + j, h.outputs - j, out + j);
  };
  if constexpr (kSums / kHeight >= 8) tiles(High<8>{});
  if constexpr (kSums / kHeight >= 4) tiles(High<4>{});
  tiles(High<2>{});
  tiles(High<1>{});
}

// Rows [first, end) of some heads.
template <typename T>
void some_rows(const HeadProducts& h, int64_t first, int64_t end, int64_t from, int64_t to) {
  for (int64_t head = from; head < to; ++head) {
    const T* w = static_cast<const T*>(h.weight) + head * h.columns * h.wide;
    const float* x = h.x + head * h.head_stride;
    float* out = h.out + head * h.out_head_stride;
    by_height(first, end, [&](auto height, int64_t row, int64_t count) {
      constexpr int kHeight = decltype(height)::rows;
      for (const int64_t stop = row + count * kHeight; row < stop; row += kHeight)
        if (row) outputs_of<kHeight, false>(h, x + row * h.stride, w, out + row * h.out_stride);
        else outputs_of<kHeight, true>(h, x, w, out);
    });
  }
}

template <typename T>
void some_heads(const HeadProducts& h, int64_t from, int64_t to) {
  for (int64_t row = 0; row < h.rows; row += kNear)
    some_rows<T>(h, row, std::min(row + kNear, h.rows), from, to);
}

}  // namespace

extern "C" void head_rows(const HeadProducts* h) {
  const int64_t numbers = h->columns * h->wide, bytes = h->kind == kFloat32 ? 4 : 2;
  const int64_t grain = worth_a_thread(h->rows * numbers, bytes * numbers);
  in_parallel(h->threads, h->heads, grain, [&](int64_t from, int64_t to) {
    if (h->kind == kBFloat16) some_heads<BFloat16>(*h, from, to);
    else if (h->kind == kFloat16) some_heads<Float16>(*h, from, to);
    else some_heads<float>(*h, from, to);
  });
}
