// The two products of attention in tiles that stay in registers: queries with keys, and weights
// with values. A few query rows go over the same keys or values, read once for all of them.
//
// How many rows a tile has is not to be seen in a result: a product with a key is summed in kRows
// lanes along the head, which `totals` folds; a value's number is one sum along the positions of a
// run. Tiles go over positions in their order: over every fourth, rows of 1 KB would all lie in the
// same few sets of L1.

#pragma once

#include "stored.h"

namespace paged {

// Positions, from a multiple of it on, whose weights have one maximum.
constexpr int kRun = 256;
constexpr int kHigh = 4;  // query rows that go over keys together, where there are as many
// And over values, two vectors of them: as many sums as half of the registers hold.
constexpr int kTallRows = kRows / 2;

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

// Rows that a pass goes over; `first` null for none.
struct Pass {
  const char* first;
  const int64_t* at;  // bytes
  Span seen;
};

// For each position of a pass the row that is asked for meanwhile: `ahead` positions on, and behind
// its last those of the next pass. Blocks lie anywhere, where a processor does not look by itself.
inline void look_ahead(const Pass& own, const Pass& then, int ahead, const char** soon) {
  ahead = std::min(ahead, own.seen.to - own.seen.from);
  const int own_end = own.seen.to - ahead;
  int p = own.seen.from / kRows * kRows;
  for (; p < own_end; ++p) soon[p] = own.first + own.at[p + ahead];
  if (then.first) {
    const int shift = then.seen.from - own_end;
    for (const int end = std::min(kRun, then.seen.to - shift); p < end; ++p)
      soon[p] = then.first + then.at[p + shift];
  }
  for (; p < kRun; ++p) soon[p] = own.first + own.at[p];  // that is here already
}

// Asks for rows of `bytes`. Into L2, not L1: a core waits for few lines into L1 at a time (on a Zen
// 4 11 GB/s of blocks of 4 KB came that way, and 17 GB/s this way, of 20 in a row). Inlined by
// force, as `ask_for`: GCC before 14 leaves out calls of functions that only prefetch.
__attribute__((always_inline)) inline void ask(const char* const* soon, int count, int64_t bytes) {
  for (int i = 0; i < count; ++i)
    for (const char *line = soon[i], *end = line + bytes; line < end; line += 64)
      __builtin_prefetch(line, 0, 2);
}

template <int kBytes>
__attribute__((always_inline)) inline void ask_for(const char* line) {
#pragma GCC unroll 16
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(line + i, 0, 2);
}

// Asked for beside a pass over keys: the rows that follow, and the values of its own positions,
// where many rows go over them in other orders. Null for nothing; widths are bytes.
struct Coming {
  const char *const *keys, *const *values;
  int64_t width, value_width;
};

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

// Of one query's products with kWidth keys the positions: those that `four_lanes` takes together.
constexpr int apart(int j) { return j / kQuarter + 4 * (j % kQuarter); }

// The products of kHeight queries with the keys of kWidth positions, as sums of kRows lanes. q:
// rows `wide` apart, padded with zeros to whole vectors.
template <typename T, int kHeight, int kWidth>
__attribute__((always_inline)) inline void dots(const HeadRows& keys, const float* q, int64_t wide,
                                                int from, Vec* own) {
  const T* k[kWidth];
#pragma GCC unroll 4
  for (int j = 0; j < kWidth; ++j) k[j] = row_of<T>(keys, from + (kHeight == 1 ? apart(j) : j));
#pragma GCC unroll 16
  for (int i = 0; i < kHeight * kWidth; ++i) own[i] = Vec{};
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
}

__attribute__((always_inline)) inline void ask_beside(const Coming& coming, int p, int count) {
  if (coming.keys) ask(coming.keys + p, count, coming.width);
  if (coming.values) ask(coming.values + p, count, coming.value_width);
}

// Products of kHeight queries with kRows positions, from a multiple of it on; several queries leave
// out those that none of them sees, outside of `seen`. scores: rows kRun apart. One query goes over
// four keys at a time: with all of them addresses would not stay in registers.
template <typename T, int kHeight>
void dots_of_step(const HeadRows& keys, const float* q, int64_t wide, int from, Span seen,
                  float* scores, const Coming& coming) {
  if constexpr (kHeight == 1) {
    Vec left[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i += 4 / kQuarter) {
      Vec some[4];
      ask_beside(coming, from + i * kQuarter, 4);
      dots<T, 1, 4>(keys, q, wide, from + i, some);
      for (int j = 0; j < 4 / kQuarter; ++j) left[i + j] = four_lanes(some + j * kQuarter);
    }
    const Vec total = one_lane(left[0], left[1], left[2], left[3]);
    std::memcpy(scores + from, &total, sizeof total);
  } else {
    constexpr int kAll = kRows / kHeight;  // positions of which the sums fill a vector
    constexpr int kWidth = std::min(kAll, 4);
    for (int p = from; p < from + kRows; p += kAll) {
      if (p >= seen.to || p + kAll <= seen.from) continue;
      Vec sums[kRows];
#pragma GCC unroll 4
      for (int j = 0; j < kAll; j += kWidth) {
        Vec some[kHeight * kWidth];
        ask_beside(coming, p + j, kWidth);
        dots<T, kHeight, kWidth>(keys, q, wide, p + j, some);
#pragma GCC unroll 16
        for (int i = 0; i < kHeight * kWidth; ++i)
          sums[i / kWidth * kAll + j + i % kWidth] = some[i];
      }
      const Vec total = totals(sums);
      for (int i = 0; i < kHeight; ++i)
        std::memcpy(scores + i * kRun + p, reinterpret_cast<const float*>(&total) + i * kAll,
                    kAll * sizeof(float));
    }
  }
}

// Adds the values of positions [from, to), times their weights, to kWide vectors of kHeight rows.
// weights: rows kRun apart. sums: rows `stride` apart. Not kWhole: the last vector ends with the
// head.
template <typename T, int kHeight, int kWide, bool kWhole>
void add_values(const HeadRows& values, int64_t c, const float* weights, int from, int to,
                float* sums, int64_t stride, const char* const* soon) {
  Vec total[kHeight][kWide];
  for (int i = 0; i < kHeight; ++i) std::memcpy(total[i], sums + i * stride, sizeof total[i]);
  for (int p = from; p < to; ++p) {
    if (soon) ask_for<kWide * kRows * sizeof(T)>(soon[p] + c * sizeof(T));
    const T* v = row_of<T>(values, p) + c;
    Vec y[kWide];
#pragma GCC unroll 8
    for (int j = 0; j < kWide; ++j)
      y[j] = kWhole ? read_whole(v + j * kRows)
                    : load_stored(v + j * kRows, values.dim - c - j * kRows);
#pragma GCC unroll 8
    for (int i = 0; i < kHeight; ++i) {
      const Vec weight = splat(weights[i * kRun + p]);
#pragma GCC unroll 8
      for (int j = 0; j < kWide; ++j) total[i][j] = fused(y[j], weight, total[i][j]);
    }
  }
  for (int i = 0; i < kHeight; ++i) std::memcpy(sums + i * stride, total[i], sizeof total[i]);
}

// For kHeight rows: positions that all of them see together, those before and behind row by row, so
// that nothing that a row does not see gets into its sums.
template <typename T, int kHeight, int kWide, bool kWhole>
void add_to_rows(const HeadRows& values, int64_t c, const float* weights, const Span* spans,
                 float* sums, int64_t stride, const char* const* soon) {
  int from = 0, to = kRun;
  for (int i = 0; i < kHeight; ++i)
    from = std::max(from, spans[i].from), to = std::min(to, spans[i].to);
  to = std::max(from, to);
  const auto alone = [&](int i, int begin, int end) {
    add_values<T, 1, kWide, kWhole>(values, c, weights + i * kRun, begin, end, sums + i * stride,
                                    stride, nullptr);
  };
  for (int i = 0; i < kHeight; ++i)
    if (spans[i].from < from) alone(i, spans[i].from, std::min(from, spans[i].to));
  add_values<T, kHeight, kWide, kWhole>(values, c, weights, from, to, sums, stride, soon);
  for (int i = 0; i < kHeight; ++i)
    if (spans[i].to > to) alone(i, std::max(to, spans[i].from), spans[i].to);
}

// One slice of the values of a run for all rows. out: rows `stride` apart.
template <typename T, int kWide, bool kWhole>
void weigh_slice(const HeadRows& values, int64_t c, const float* weights, const Span* spans,
                 int rows, float* out, int64_t stride, const char* const* soon) {
  for (int row = 0; row < rows; ++row) std::memset(out + row * stride, 0, kWide * sizeof(Vec));
  int row = 0;
  const auto tiles = [&](auto height) {
    constexpr int kHeight = decltype(height)::value;
    for (; rows - row >= kHeight; row += kHeight)
      add_to_rows<T, kHeight, kWide, kWhole>(values, c, weights + row * kRun, spans + row,
                                             out + row * stride, stride, row ? nullptr : soon);
  };
  if constexpr (kWide <= 2) tiles(std::integral_constant<int, kTallRows>());
  if constexpr (kWide <= 4 && kTallRows > 4) tiles(std::integral_constant<int, 4>());
  if constexpr (kWide <= 4) tiles(std::integral_constant<int, 2>());
  tiles(std::integral_constant<int, 1>());
}

}  // namespace paged
