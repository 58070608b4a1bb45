// Rows times a weight that lies as checkpoints have it, [outputs, columns], in fp32, bf16 or fp16.
//
// Small tiles of rows and outputs, summed along the columns in kRows lanes. Of a weight nothing is
// packed, so it is read once for a few rows, which is what a step of few tokens costs; its numbers
// of 16 bits become fp32 in registers. Many columns are gone through in blocks, with the lanes' sums
// kept between them, so that rows stay in caches. A row's sums are in one order, whatever rows are
// beside it.

#include <cstdint>
#include <cstring>
#include <vector>

#include "laid_out.h"
#include "linear.h"
#include "parallel.h"
#include "stored.h"
#include "tile.h"
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

namespace {

constexpr int kSums = kRows;              // of a tile: rows times outputs
constexpr int64_t kBlock = 1024;          // columns; half as many of fp32 for a few rows
constexpr int64_t kKept = 64 * kBlock;    // numbers of rows that stay in the second-level cache
constexpr int64_t kGroups = 32 / kSums;   // of kSums outputs, that go through a block together
constexpr int64_t kLaidOut = 1 << 20;     // numbers of rows that are laid out at once
constexpr int64_t kStream = 8 << 10;      // bytes: longer rows of a weight are read side by side

// Into a register, once: GCC would read it anew for every product.
typedef float Loose __attribute__((vector_size(sizeof(Vec)), aligned(4), may_alias));
inline Vec load_once(const float* from) { return *reinterpret_cast<const volatile Loose*>(from); }

// Vectors of a weight that are read at once: what a cache line has.
template <typename T>
constexpr int kStep = kRows == 16 ? sizeof(float) / sizeof(T) : 1;

inline void load_step(const float* from, Vec* to) { to[0] = load_once(from); }

template <typename T>
inline void load_step(const T* from, Vec* to) {
  for (int s = 0; s < kStep<T>; ++s) to[s] = load_stored(from + s * kRows, kRows);
}

#ifdef __AVX512BW__
// One shuffle puts 16 numbers into the upper halves of lanes; a conversion takes two instructions.
inline void load_step(const BFloat16* from, Vec* to) {
  typedef uint16_t Places __attribute__((vector_size(64)));
  const Places places = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                         8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
  const __m512i line = _mm512_loadu_si512(from);
  for (int s = 0; s < 2; ++s) {
    const __m512i at = reinterpret_cast<__m512i>(places + static_cast<uint16_t>(16 * s));
    to[s] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, at, line));
  }
}
#endif

// x: [columns / kRows, kHeight, kRows], zeros behind the last column. w: of each output. ask: of
// kAsk outputs, where what is `ahead` bytes further is asked for meanwhile, into the second-level
// cache: for the first a core waits for few lines at a time. Of a weight that no cache holds 22 GB/s
// come in place of 13 (one row, 1536 x 256), and one to five rows take a third less.
template <int kHeight, int kWidth, int kAsk, typename T>
inline void multiply(const float* x, const T* const* w, int64_t columns, const T* const* ask,
                     int64_t ahead, Vec* sums) {
  constexpr int kWide = kStep<T> * kRows;
  const int64_t whole = columns / kWide * kWide;
  int64_t c = 0;
  for (; c < whole; c += kWide, x += kWide * kHeight) {
#pragma GCC unroll 16
    for (int j = 0; j < kAsk; ++j)
      __builtin_prefetch(reinterpret_cast<const char*>(ask[j] + c) + ahead, 0, 2);
    Vec a[kStep<T> * kHeight];
#pragma GCC unroll 8
    for (int i = 0; i < kStep<T> * kHeight; ++i) a[i] = load_once(x + i * kRows);
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) {
      Vec b[kStep<T>];
      load_step(w[j] + c, b);
#pragma GCC unroll 2
      for (int s = 0; s < kStep<T>; ++s)
#pragma GCC unroll 4
        for (int i = 0; i < kHeight; ++i) {
          Vec& sum = sums[i * kWidth + j];
          sum = fused(a[s * kHeight + i], b[s], sum);
        }
    }
  }
  for (; c < columns; c += kRows, x += kRows * kHeight)
    for (int j = 0; j < kWidth; ++j) {
      const Vec b = load_stored(w[j] + c, columns - c);
      for (int i = 0; i < kHeight; ++i) {
        Vec& sum = sums[i * kWidth + j];
        sum = fused(load_once(x + i * kRows), b, sum);
      }
    }
}

// The totals of a tile's sums, [kHeight, outputs]; outputs beyond the last are not written.
template <int kHeight>
inline void finish(const Linear& l, const Vec* sums, int64_t row, int64_t output) {
  store_totals<kHeight>(sums, l.bias ? l.bias + output : nullptr, l.outputs - output,
                        l.out + row * l.out_stride + output, l.out_stride);
}

// Rows [row, end) and a block of columns.
template <typename T>
struct Part {
  const Linear& l;
  const LaidOut& laid;
  int64_t row, end, column;

  int64_t columns() const { return std::min(laid.block, l.columns - column); }
  // Outputs beyond the last are the last again.
  const T* weight(int64_t output) const {
    return static_cast<const T*>(l.weight) + std::min(output, l.outputs - 1) * l.columns + column;
  }
};

// A tile is finished, or where columns are several blocks, its sums go on from `kept`. asks: the
// first of the kAsk outputs.
template <int kHeight, int kAsk, bool kBlocks, typename T>
void tile(const Part<T>& p, int64_t row, int64_t output, int64_t asks, Vec* kept) {
  constexpr int kWidth = kSums / kHeight;
  const T* w[kWidth];
  for (int j = 0; j < kWidth; ++j) w[j] = p.weight(output + j);
  const int64_t next = kWidth * p.l.columns * int64_t{sizeof(T)};
  Vec sums[kSums] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i)
    if (kBlocks) sums[i] = kept[i];
  multiply<kHeight, kWidth, kAsk>(p.laid.tile(row, p.column), w, p.columns(), w + asks,
                                  std::max(next, kStream), sums);
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i)
    if (kBlocks) kept[i] = sums[i];
  if (!kBlocks) finish<kHeight>(p.l, sums, p.laid.first + row, output);
}

// `count` tiles of rows, and kSums outputs. kept: [row of a tile, output, sum]. The first tiles of the
// same outputs share what is asked for, the block of the next outputs.
template <int kHeight, bool kBlocks, typename T>
void tiles(const Part<T>& p, int64_t row, int64_t count, int64_t output, Vec* kept) {
  constexpr int kWidth = kSums / kHeight;
  const int each = count == 1 ? kWidth : count < kWidth ? kWidth / 2 : 1;
  for (int64_t j = 0; j < std::min<int64_t>(kSums, p.l.outputs - output); j += kWidth)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = row + i * kHeight, asks = i * each;
      Vec* own = kept + i * kHeight * kSums + j * kHeight;
      if (asks >= kWidth) tile<kHeight, 0, kBlocks>(p, at, output + j, 0, own);
      else if (each == kWidth) tile<kHeight, kWidth, kBlocks>(p, at, output + j, 0, own);
      else if constexpr (kHeight == kHigh) {
        if (each == 1) tile<kHeight, 1, kBlocks>(p, at, output + j, asks, own);
        else tile<kHeight, kWidth / 2, kBlocks>(p, at, output + j, asks, own);
      }
    }
}

// kSums outputs. kept: [rows of the part, kSums].
template <bool kBlocks, typename T>
void group(const Part<T>& p, int64_t output, Vec* kept) {
  by_height(p.row, p.end, [&](auto height, int64_t row, int64_t count) {
    tiles<height.rows, kBlocks>(p, row, count, output, kept + (row - p.row) * kSums);
  });
}

template <typename T>
void finish_group(const Part<T>& p, int64_t output, const Vec* kept) {
  by_height(p.row, p.end, [&](auto height, int64_t row, int64_t count) {
    for (int64_t at = row; at < row + count * height.rows; at += height.rows)
      for (int64_t j = 0; j < kSums; j += kSums / height.rows)
        finish<height.rows>(p.l, kept + (at - p.row) * kSums + j * height.rows, p.laid.first + at,
                            output + j);
  });
}

// Groups [from, to) of outputs, kGroups of them at a time through all blocks.
template <typename T>
void in_blocks(const Linear& l, const LaidOut& laid, int64_t row, int64_t end, int64_t from,
               int64_t to) {
  Vec kept[kGroups * kSums * (kKept / kBlock)];
  const int64_t each = (end - row) * kSums;
  for (int64_t first = from; first < to; first += kGroups) {
    const int64_t count = std::min(kGroups, to - first);
    std::fill_n(kept, count * each, Vec{});
    for (int64_t c = 0; c < l.columns; c += laid.block)
      for (int64_t i = 0; i < count; ++i)
        group<true>(Part<T>{l, laid, row, end, c}, (first + i) * kSums, kept + i * each);
    for (int64_t i = 0; i < count; ++i)
      finish_group(Part<T>{l, laid, row, end, 0}, (first + i) * kSums, kept + i * each);
  }
}

// Rows that stay in a cache, or a block of them.
template <typename T>
void several_rows(const Linear& l, const LaidOut& laid, int64_t from, int64_t to) {
  const bool blocks = laid.block < l.columns;
  const int64_t fit = std::max<int64_t>(kHigh, kKept / l.columns / kHigh * kHigh);
  const int64_t most = blocks ? kKept / kBlock : fit;
  for (int64_t row = 0; row < laid.rows; row += most) {
    const int64_t end = std::min(row + most, laid.rows);
    if (blocks) in_blocks<T>(l, laid, row, end, from, to);
    else
      for (int64_t i = from; i < to; ++i)
        group<false>(Part<T>{l, laid, row, end, 0}, i * kSums, static_cast<Vec*>(nullptr));
  }
}

// One row: kWidth outputs side by side, block by block.
template <int kWidth, int kAsk, typename T>
void one_group(const Linear& l, const LaidOut& laid, int64_t output, int64_t ahead) {
  Vec sums[kSums] = {};
  for (int64_t c = 0; c < l.columns; c += laid.block) {
    const Part<T> part{l, laid, 0, 1, c};
    for (int j = 0; j < kSums && output + j < l.outputs; j += kWidth) {
      const T* w[kWidth];
      for (int i = 0; i < kWidth; ++i) w[i] = part.weight(output + j + i);
      Vec own[kWidth];  // in registers
      std::copy_n(sums + j, kWidth, own);
      multiply<1, kWidth, kAsk>(laid.tile(0, c), w, part.columns(), w, ahead, own);
      std::copy_n(own, kWidth, sums + j);
    }
  }
  finish<1>(l, sums, laid.first, output);
}

// Measured: 16 bits are read the fastest in one stream, fp32 in four that the processor looks ahead
// in by itself, or where rows are short, in as many as there are sums. Of long rows of 16 bits four
// blocks stand side by side, as the sums of one output wait for each other.
template <typename T>
void one_row(const Linear& l, const LaidOut& laid, int64_t from, int64_t to) {
  constexpr bool kFull = sizeof(T) == sizeof(float);
  const int64_t bytes = l.columns * int64_t{sizeof(T)};
  for (int64_t i = from; i < to; ++i)
    if (kFull && bytes > kStream / 4) one_group<4, 0, T>(l, laid, i * kSums, 0);
    else if (kFull) one_group<kSums, kSums, T>(l, laid, i * kSums, 2 * kStream);
    else if (bytes <= kStream) one_group<1, 1, T>(l, laid, i * kSums, kStream);
    else one_group<4, 4, T>(l, laid, i * kSums, 4 * bytes);
}

// Columns of a block, a multiple of kRows. Measured: less than a tile of rows reads whole rows of a
// weight the fastest, a few rows blocks of 2 KB.
template <typename T>
int64_t block_of(const Linear& l) {
  if (l.columns <= kBlock) return kBlock;
  const int64_t whole = (l.columns + kRows - 1) / kRows * kRows;
  const bool streams = l.columns * int64_t{sizeof(T)} <= kStream;
  if (l.rows == 1 && sizeof(T) < sizeof(float)) return streams ? whole : kBlock;
  if (l.rows < kHigh) return whole;
  return sizeof(T) == sizeof(float) && l.rows <= 16 ? kBlock / 2 : kBlock;
}

template <typename T>
void some_outputs(const Linear& l, const LaidOut& laid, int64_t from, int64_t to) {
  if (laid.rows == 1) one_row<T>(l, laid, from, to);
  else several_rows<T>(l, laid, from, to);
}

// body(rows, first, last): of groups of kSums outputs.
template <typename T, typename Body>
void all_rows(const Linear& l, int64_t each, const Body& body) {
  static thread_local std::vector<float> room;
  const int64_t most = std::max<int64_t>(kKept / kBlock, kLaidOut / l.columns / kHigh * kHigh);
  const int64_t parts = (l.outputs + each - 1) / each;
  for (int64_t first = 0; first < l.rows; first += most) {
    const LaidOut laid = lay_out(l, first, std::min(most, l.rows - first), block_of<T>(l), room);
    const int64_t numbers = l.columns * each, bytes = l.kind == kFloat32 ? 4 : 2;
    const int64_t grain = worth_a_thread(laid.rows * numbers, bytes * numbers);
    in_parallel(l.threads, parts, grain, [&](int64_t from, int64_t to) { body(laid, from, to); });
  }
}

template <typename T>
void stored_rows(const Linear& l) {
  all_rows<T>(l, kSums, [&](const LaidOut& laid, int64_t from, int64_t to) {
    some_outputs<T>(l, laid, from, to);
  });
}

template <typename T>
void made_rows(const Linear& l, int64_t each, const MadeWeight& made) {
  all_rows<T>(l, each, [&](const LaidOut& laid, int64_t from, int64_t to) {
    for (int64_t output = from * each; output < std::min(to * each, l.outputs); output += each) {
      Linear part = l;
      part.outputs = std::min(each, l.outputs - output);
      part.weight = made(output, output + part.outputs);
      part.out += output;
      if (part.bias) part.bias += output;
      some_outputs<T>(part, laid, 0, (part.outputs + kSums - 1) / kSums);
    }
  });
}

}  // namespace

extern "C" void linear_rows(const Linear* l) {
  if (l->kind == kBFloat16) stored_rows<BFloat16>(*l);
  else if (l->kind == kFloat16) stored_rows<Float16>(*l);
  else stored_rows<float>(*l);
}

void linear_made(const Linear& l, int64_t each, const MadeWeight& made) {
  if (l.kind == kBFloat16) made_rows<BFloat16>(l, each, made);
  else if (l.kind == kFloat16) made_rows<Float16>(l, each, made);
  else made_rows<float>(l, each, made);
}
