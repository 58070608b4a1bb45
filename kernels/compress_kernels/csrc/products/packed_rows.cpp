// Rows times codes, bit for bit as linear.cpp has it of the decoded weight.
//
// Of 16 outputs and a chunk of columns (512 / bits) each output has 64 bytes: lane l of 16 holds of
// its columns those that are l beyond a multiple of 16. Sums are in linear.cpp's lanes, so products
// take decoded numbers from registers: a whole code of 4 bits or less is the place in a table of 16
// that a vector permutation looks up, made once a group; others are computed for each tile of a few
// rows, or looked up as magnitudes.h says. For more rows they are decoded to memory, some panels at
// a time, and so are those of permuted columns, and all where there is no AVX-512.

#include <cmath>
#include <cstring>
#include <vector>

#include "decode.h"
#include "linear.h"
#include "magnitudes.h"
#include "parallel.h"

namespace {

constexpr int64_t kKept = 256 << 10;     // numbers of rows, for the second-level cache
constexpr int64_t kDecoded = 256 << 10;  // bytes of decoded panels, for the same
constexpr int64_t kFew = 16;             // rows, up to which each tile makes its numbers

// A panel's numbers, as they are made the fastest.
#ifdef __AVX512F__
template <int kBits, int kCodes, int kPlain>
using Looked =
    std::conditional_t<tabled(kCodes, kBits), Table<kBits>, Values<kBits, kCodes, kPlain>>;
#else
template <int kBits, int kCodes, int kPlain>
using Looked = Values<kBits, kCodes, kPlain>;
#endif

// As they are multiplied: in their dtype, or in fp32.
template <int kBits, int kCodes, int kPlain, typename T>
void decode_panel(const Packed& p, int64_t panel, T* to) {
  if constexpr (std::is_same_v<T, Plain<kPlain>>)
    decode<kBits, kPlain, Looked<kBits, kCodes, kPlain>>(p, panel, to);
#ifdef __AVX512BW__
  else store_panel(p, panel, to);
#endif
}

// All panels, decoded a few at a time.
template <int kBits, int kCodes, int kPlain, int kAs = kPlain>
void decoded(const Packed& p) {
  using T = Plain<kAs>;
  const int64_t each = kPanel * p.inputs;
  const int64_t most = std::max<int64_t>(1, kDecoded / int64_t{sizeof(T)} / each);
  const Linear job{p.x, nullptr, p.bias, p.out, p.rows, p.inputs, p.outputs,
                   p.stride, p.out_stride, kAs, p.threads};
  linear_made(job, most * kPanel, [&](int64_t from, int64_t to) -> const void* {
    static thread_local std::vector<T> room;
    const int64_t wanted = most * each + kLine / int64_t{sizeof(T)};
    if (static_cast<int64_t>(room.size()) < wanted) room.resize(wanted);
    T* const weight = at_line(room.data());
    T* at = weight;
    for (int64_t panel = from / kPanel; panel * kPanel < to; ++panel, at += each)
      decode_panel<kBits, kCodes, kPlain>(p, panel, at);
    return weight;
  });
}

#ifdef __AVX512F__
// kHigh rows and kRows / kHigh outputs of a panel. grid: of the panel's groups, one after the other.
// kOne: a chunk has one group.
template <typename Numbers, int kHigh, bool kOne>
void tile(const Packed& p, const float* x, int64_t row, int64_t panel, int first, const Grid* grid) {
  constexpr int kWidth = kRows / kHigh, kEach = 32 / Numbers::kBits;
  constexpr int kOnce = kWidth <= 4 ? kWidth : 1;  // outputs that a loaded number of x is for
  Vec sums[kRows] = {};
  const uint8_t* codes = p.codes + panel * p.panel_bytes + first * kLine;
  const Grid* grids[kEach];  // of the steps of a chunk
  int64_t end = p.group;     // of the grid's columns
  for (int64_t k = 0; k < p.inputs; k += kStep * kEach, codes += kPanel * kLine) {
    const int steps = std::min<int64_t>(kEach, (p.inputs - k + kStep - 1) / kStep);
    for (int j = 0; j < (kOne ? 1 : steps); ++j) {
      if (k + kStep * j == end) ++grid, end += p.group;
      grids[j] = grid;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; r += kOnce) {
      Ints packed[kOnce];
      Numbers numbers[kOnce];
#pragma GCC unroll 4
      for (int q = 0; q < kOnce; ++q) {
        std::memcpy(&packed[q], codes + (r + q) * kLine, kLine);
        __builtin_prefetch(codes + (r + q) * kLine + kAhead);
        numbers[q].read(p, *grids[0], first + r + q);
      }
      const auto add = [&](int j) {
        Vec b[kOnce];
#pragma GCC unroll 4
        for (int q = 0; q < kOnce; ++q) b[q] = numbers[q].at(packed[q], j);
#pragma GCC unroll 8
        for (int i = 0; i < kHigh; ++i) {
          const Vec a = load_once(x + (k + kStep * j) * kHigh + kStep * i);
#pragma GCC unroll 4
          for (int q = 0; q < kOnce; ++q) {
            Vec& sum = sums[i * kWidth + r + q];
            sum = fused(a, b[q], sum);
          }
        }
      };
      // One row waits for the steps' loop: 0.53 ms of 4096 x 4096 in place of 0.61. Of eight rows a
      // step fills the registers, and steps side by side spill them: 2.9 ms in place of 1.95.
      if (kOne && kHigh <= 2 && steps == kEach) {
#pragma GCC unroll 8
        for (int j = 0; j < kEach; ++j) add(j);
        continue;
      }
#pragma GCC unroll 1
      for (int j = 0; j < steps; ++j) {
        if (!kOne && j && grids[j] != grids[j - 1])
          for (int q = 0; q < kOnce; ++q) numbers[q].read(p, *grids[j], first + r + q);
        add(j);
      }
    }
  }
  finish<kHigh>(p, sums, row, panel * kPanel + first);
}

template <typename Numbers, int kHigh>
void whole(const Packed& p, const float* x, int64_t row, int64_t panel, const Grid* grid) {
  const bool one = p.group % (512 / Numbers::kBits) == 0 || p.group >= p.inputs;
  for (int first = 0; first < kPanel; first += kRows / kHigh) {
    if constexpr (Numbers::kLong)
      if (one) {
        tile<Numbers, kHigh, true>(p, x, row, panel, first, grid);
        continue;
      }
    tile<Numbers, kHigh, false>(p, x, row, panel, first, grid);
  }
}

// Panels [from, to), a tile of rows after the other.
template <typename Numbers>
void direct(const Packed& p, Near& near, int64_t from, int64_t to) {
  static thread_local std::vector<Grid> grids;
  grids.resize(p.groups);
  for (int64_t panel = from; panel < to; ++panel) {
    for (int64_t group = 0; group < p.groups; ++group) grids[group].read(p, panel, group);
    for (int64_t row = 0; row < p.rows;) {
      const int high = height(p.rows - row);
      const float* x = near.at(row);
      if (high == 8) whole<Numbers, 8>(p, x, row, panel, grids.data());
      if (high == 4) whole<Numbers, 4>(p, x, row, panel, grids.data());
      if (high == 2) whole<Numbers, 2>(p, x, row, panel, grids.data());
      if (high == 1) whole<Numbers, 1>(p, x, row, panel, grids.data());
      row += high;
    }
  }
}

// Of few rows.
template <int kBits, int kCodes, int kPlain>
void near_rows(const Packed& p, Near& near, int64_t from, int64_t to) {
  if constexpr (tabled(kCodes, kBits)) direct<Table<kBits>>(p, near, from, to);
  else direct<Values<kBits, kCodes, kPlain>>(p, near, from, to);
}

template <int kBits, int kCodes, int kPlain>
void in_strips(const Packed& p) {
  static thread_local Near near;
  Packed part = p;
  const int64_t strip = std::max<int64_t>(8, kKept / p.inputs / 8 * 8);
  for (int64_t row = 0; row < p.rows; row += strip) {
    part.x = p.x + row * p.stride;
    part.out = p.out + row * p.out_stride;
    part.rows = std::min(strip, p.rows - row);
    near.read(part);
    Near& rows = near;  // this thread's
    const int64_t grain = worth_a_thread(part.rows * p.inputs * kPanel, p.panel_bytes);
    in_parallel(p.threads, p.panels(), grain, [&](int64_t from, int64_t to) {
#ifdef __AVX512BW__
      if constexpr (kCodes == kE4M3 && kPlain == kBFloat16)
        if (has_magnitudes(p)) return magnitudes(part, rows, from, to);
#endif
      near_rows<kBits, kCodes, kPlain>(part, rows, from, to);
    });
  }
}

// Whether products take numbers from registers. Tables are made again for each tile: 64 rows with
// 4096 x 4096 in groups of 32 took 26 ms in place of 15.
inline bool stays(const Packed& p) {
  return !p.columns && p.rows <= kFew;
}
#endif

template <int kBits, int kCodes, int kPlain>
void all_rows(const Packed& p) {
#ifdef __AVX512F__
  if (stays(p)) return in_strips<kBits, kCodes, kPlain>(p);
#endif
#ifdef __AVX512BW__
  if constexpr (kCodes == kE4M3 && kPlain == kBFloat16)
    if (has_magnitudes(p)) return decoded<kBits, kCodes, kPlain, kFloat32>(p);
#endif
  decoded<kBits, kCodes, kPlain>(p);
}

template <int kBits, int kCodes>
void rows_of(const Packed& p) {
  if (p.plain_kind == kBFloat16) all_rows<kBits, kCodes, kBFloat16>(p);
  else if (p.plain_kind == kFloat16) all_rows<kBits, kCodes, kFloat16>(p);
  else all_rows<kBits, kCodes, kFloat32>(p);
}

// Numbers of blocks are fp32.
void unsigned_rows(const Packed& p) {
  if (p.bits == 2) all_rows<2, kUnsigned, kFloat32>(p);
  else if (p.bits == 4) all_rows<4, kUnsigned, kFloat32>(p);
  else all_rows<8, kUnsigned, kFloat32>(p);
}

}  // namespace

extern "C" void packed_rows(const Packed* p) {
  if (p->codes_are == kE4M3) rows_of<8, kE4M3>(*p);
  else if (p->codes_are == kE2M1) rows_of<4, kE2M1>(*p);
  else if (p->codes_are == kIQ4) all_rows<4, kIQ4, kFloat32>(*p);
  else if (p->codes_are == kUnsigned) unsigned_rows(*p);
  else if (p->bits == 2) rows_of<2, kWhole>(*p);
  else if (p->bits == 4) rows_of<4, kWhole>(*p);
  else rows_of<8, kWhole>(*p);
}
