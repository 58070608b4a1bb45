// The two products of attention in tiles that stay in registers: queries with keys, and weights
// with values. A few query rows go over the same keys or values, read once for all of them.
//
// How many rows a tile has is not to be seen in a result: a product with a key is summed in kRows
// lanes along the head, which `totals` folds; a value's number is summed along the positions of a
// run, in kChains chains by position modulo kChains, of which (0 + 1) + (2 + 3) is the sum.

#pragma once

#include "stored.h"

namespace paged {

// Positions, from a multiple of it on, whose weights have one maximum.
constexpr int kRun = 256;
constexpr int kHigh = 4;           // query rows of a tile, where there are as many
constexpr int kChains = 4;         // one sum alone would wait for itself
constexpr int kSlice = kRows / 4;  // vectors of a head that are summed at once
constexpr int kSliceWidth = kSlice * kRows;

// Keys or values of one head: the numbers of position p of a run begin at first + at[p].
struct HeadRows {
  const char* first;
  const int64_t* at;  // bytes
  int64_t dim;
};

// Positions of a run that a query row sees; none where `to` is `from`.
struct Span {
  int from, to;
};

// What is read soon: rows of the same pass, `ahead` positions on, and behind its last those of the
// next. Blocks lie anywhere, where a processor does not look by itself.
struct Next {
  const char *own, *then;  // null for nothing
  const int64_t *own_at, *then_at;
  Span own_seen, then_seen;
  int ahead;
  int64_t size;  // bytes of a number
};

// Beside a pass over keys: the rows that follow, and the values of its own positions, where many
// rows go over them in other orders. Widths: numbers of a row, 0 for nothing.
struct Coming {
  Next keys, values;
  int64_t width, value_width;
};

// kWidth numbers from number c on. Into L2, not L1: a core waits for few lines into L1 at a time
// (on a Zen 4 11 GB/s of blocks of 4 KB came that way, and 17 GB/s this way, of 20 in a row).
// Inlined by force: GCC before 14 leaves out calls of functions that only prefetch.
template <int kWidth, int kSize>
__attribute__((always_inline)) inline void fetch(const Next& next, int p, int64_t c) {
  const char* line;
  p += next.ahead;
  if (p < next.own_seen.to) {
    line = next.own + next.own_at[p];
  } else {
    p += next.then_seen.from - next.own_seen.to;
    if (p >= next.then_seen.to) return;
    line = next.then + next.then_at[p];
  }
  line += c * next.size;
  if (next.size == kSize) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth * kSize; i += 64) __builtin_prefetch(line + i, 0, 2);
  } else {
    for (const char* end = line + kWidth * next.size; line < end; line += 64)
      __builtin_prefetch(line, 0, 2);
  }
}

template <typename T>
inline const T* row_of(const HeadRows& rows, int p) {
  return reinterpret_cast<const T*>(rows.first + rows.at[p]);
}

// Into a register, once: GCC would read it anew for every product.
typedef float LooseVec __attribute__((vector_size(sizeof(Vec)), aligned(4), may_alias));
inline Vec read_once(const float* from) {
  return *reinterpret_cast<const volatile LooseVec*>(from);
}

template <typename T>
inline Vec read_whole(const T* from) {
  if constexpr (sizeof(T) == sizeof(float)) return read_once(from);
  else return load_stored(from, kRows);
}

// Adds the products of kHeight queries with the keys of kWidth positions to sums of kRows lanes.
// q: rows `wide` apart, padded with zeros to whole vectors.
template <typename T, int kHeight, int kWidth>
inline void dots(const HeadRows& keys, const float* q, int64_t wide, int from, Vec* sums,
                 const Coming& coming) {
  const T* k[kWidth];
  for (int j = 0; j < kWidth; ++j) {
    k[j] = row_of<T>(keys, from + j);
    for (int64_t c = 0; c < coming.width; c += 4 * kRows)
      fetch<4 * kRows, sizeof(T)>(coming.keys, from + j, c);
    for (int64_t c = 0; c < coming.value_width; c += 4 * kRows)
      fetch<4 * kRows, sizeof(T)>(coming.values, from + j, c);
  }
  Vec own[kHeight * kWidth] = {};
  const int64_t whole = keys.dim / kRows * kRows;
  for (int64_t c = 0; c < whole; c += kRows) {
    Vec x[kHeight];
#pragma GCC unroll 4
    for (int i = 0; i < kHeight; ++i) x[i] = read_once(q + i * wide + c);
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; ++j) {
      const Vec y = read_whole(k[j] + c);
#pragma GCC unroll 4
      for (int i = 0; i < kHeight; ++i) own[i * kWidth + j] = fused(x[i], y, own[i * kWidth + j]);
    }
  }
  if (whole < keys.dim)
    for (int j = 0; j < kWidth; ++j) {
      const Vec y = load_stored(k[j] + whole, keys.dim - whole);
      for (int i = 0; i < kHeight; ++i)
        own[i * kWidth + j] = fused(read_once(q + i * wide + whole), y, own[i * kWidth + j]);
    }
  std::copy_n(own, kHeight * kWidth, sums);
}

// Products of kHeight queries with kRows positions, from a multiple of it on. scores: rows kRun
// apart. One query goes over few keys at a time: with all of them addresses would not stay in
// registers.
template <typename T, int kHeight>
void dots_of_step(const HeadRows& keys, const float* q, int64_t wide, int from, float* scores,
                  const Coming& coming) {
  constexpr int kWidth = std::min(kRows / kHeight, 4);
  constexpr int kAll = kRows / kHeight;  // positions of which the sums fill a vector
  for (int p = from; p < from + kRows; p += kAll) {
    Vec sums[kRows];
    for (int j = 0; j < kAll; j += kWidth) {
      Vec some[kHeight * kWidth];
      dots<T, kHeight, kWidth>(keys, q, wide, p + j, some, coming);
      for (int i = 0; i < kHeight; ++i) std::copy_n(some + i * kWidth, kWidth, sums + i * kAll + j);
    }
    const Vec total = totals(sums);
    for (int i = 0; i < kHeight; ++i)
      std::memcpy(scores + i * kRun + p, reinterpret_cast<const float*>(&total) + i * kAll,
                  kAll * sizeof(float));
  }
}

// Adds the values of every kChains-th position in [from, to), times their weights, to kWide vectors
// of kHeight rows. weights: rows kRun apart. sums: rows kSliceWidth apart. Not kWhole: the last
// vector ends with the head.
template <typename T, int kHeight, int kWide, bool kWhole>
void chain(const HeadRows& values, int64_t c, const float* weights, int from, int to, float* sums,
           const Next& next) {
  Vec total[kHeight][kWide];
  for (int i = 0; i < kHeight; ++i)
    std::memcpy(total[i], sums + i * kSliceWidth, sizeof total[i]);
  for (int p = from; p < to; p += kChains) {
    fetch<kWide * kRows, sizeof(T)>(next, p, c);
    const T* v = row_of<T>(values, p) + c;
    Vec y[kWide];
#pragma GCC unroll 4
    for (int j = 0; j < kWide; ++j)
      y[j] = kWhole ? read_whole(v + j * kRows)
                    : load_stored(v + j * kRows, values.dim - c - j * kRows);
#pragma GCC unroll 4
    for (int i = 0; i < kHeight; ++i) {
      const Vec weight = splat(weights[i * kRun + p]);
#pragma GCC unroll 4
      for (int j = 0; j < kWide; ++j) total[i][j] = fused(y[j], weight, total[i][j]);
    }
  }
  for (int i = 0; i < kHeight; ++i)
    std::memcpy(sums + i * kSliceWidth, total[i], sizeof total[i]);
}

// All chains of one row, side by side. from, to: multiples of kChains. sums: chains `apart`.
template <typename T, int kWide, bool kWhole>
void chains(const HeadRows& values, int64_t c, const float* weights, int from, int to, float* sums,
            int64_t apart, const Next& next) {
  Vec total[kChains][kWide];
  for (int i = 0; i < kChains; ++i) std::memcpy(total[i], sums + i * apart, sizeof total[i]);
  for (int p = from; p < to; p += kChains)
#pragma GCC unroll 4
    for (int i = 0; i < kChains; ++i) {
      fetch<kWide * kRows, sizeof(T)>(next, p + i, c);
      const T* v = row_of<T>(values, p + i) + c;
      const Vec weight = splat(weights[p + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kWide; ++j)
        total[i][j] = fused(kWhole ? read_whole(v + j * kRows)
                                   : load_stored(v + j * kRows, values.dim - c - j * kRows),
                            weight, total[i][j]);
    }
  for (int i = 0; i < kChains; ++i) std::memcpy(sums + i * apart, total[i], sizeof total[i]);
}

// The first position of a chain at or behind `from`.
inline int first_of(int chain, int from) { return from + ((chain - from) & (kChains - 1)); }

// One chain of kHeight rows: positions that all of them see together, those before and behind row
// by row, so that nothing that a row does not see gets into its sums.
template <typename T, int kHeight, int kWide, bool kWhole>
void chain_of_rows(const HeadRows& values, int64_t c, const float* weights, const Span* spans,
                   int number, float* sums, const Next& next) {
  int from = 0, to = kRun;
  for (int i = 0; i < kHeight; ++i)
    from = std::max(from, spans[i].from), to = std::min(to, spans[i].to);
  to = std::max(from, to);
  const auto alone = [&](int i, int begin, int end) {
    chain<T, 1, kWide, kWhole>(values, c, weights + i * kRun, first_of(number, begin), end,
                               sums + i * kSliceWidth, Next{});
  };
  for (int i = 0; i < kHeight; ++i)
    if (spans[i].from < from) alone(i, spans[i].from, std::min(from, spans[i].to));
  chain<T, kHeight, kWide, kWhole>(values, c, weights, first_of(number, from), to, sums, next);
  for (int i = 0; i < kHeight; ++i)
    if (spans[i].to > to) alone(i, std::max(to, spans[i].from), spans[i].to);
}

template <typename T, int kWide, bool kWhole>
void chains_of_row(const HeadRows& values, int64_t c, const float* weights, Span span, float* sums,
                   int64_t apart, const Next& next) {
  const auto one = [&](int p) {
    chain<T, 1, kWide, kWhole>(values, c, weights, p, p + 1, sums + p % kChains * apart, Next{});
  };
  int p = span.from;
  for (; p < span.to && p % kChains; ++p) one(p);
  const int end = p + (span.to - p) / kChains * kChains;
  chains<T, kWide, kWhole>(values, c, weights, p, end, sums, apart, next);
  for (p = end; p < span.to; ++p) one(p);
}

// One slice of the values of a run for all rows. out: rows `stride` apart. sums: memory of
// kChains * rows * kSliceWidth numbers.
template <typename T, int kWide, bool kWhole>
void weigh_slice(const HeadRows& values, int64_t c, const float* weights, const Span* spans,
                 int rows, float* sums, float* out, int64_t stride, const Next& next) {
  const int64_t apart = static_cast<int64_t>(rows) * kSliceWidth;
  std::memset(sums, 0, kChains * apart * sizeof(float));
  const int tiled = rows / kHigh * kHigh;
  int row = tiled;
  for (int i = 0; i < kChains; ++i) {
    float* own = sums + i * apart;
    for (row = 0; row < tiled; row += kHigh)
      chain_of_rows<T, kHigh, kWide, kWhole>(values, c, weights + row * kRun, spans + row, i,
                                             own + row * kSliceWidth, row ? Next{} : next);
    if (rows - row >= 2) {
      chain_of_rows<T, 2, kWide, kWhole>(values, c, weights + row * kRun, spans + row, i,
                                         own + row * kSliceWidth, row ? Next{} : next);
      row += 2;
    }
  }
  if (row < rows)
    chains_of_row<T, kWide, kWhole>(values, c, weights + row * kRun, spans[row],
                                    sums + row * kSliceWidth, apart, row ? Next{} : next);
  for (row = 0; row < rows; ++row)
    for (int j = 0; j < kWide; ++j) {
      Vec part[kChains];
      for (int i = 0; i < kChains; ++i)
        std::memcpy(&part[i], sums + i * apart + row * kSliceWidth + j * kRows, sizeof(Vec));
      const Vec sum = (part[0] + part[1]) + (part[2] + part[3]);
      std::memcpy(out + row * stride + c + j * kRows, &sum, sizeof(Vec));
    }
}

}  // namespace paged
