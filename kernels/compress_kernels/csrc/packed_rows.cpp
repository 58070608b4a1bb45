// Rows times codes, bit for bit as linear.cpp has it of the decoded weight.
//
// Of 16 outputs and a chunk of columns (512 / bits) each output has 64 bytes: lane l of 16 holds of
// its columns those that are l beyond a multiple of 16. Sums are in linear.cpp's lanes, so products
// take decoded numbers from registers: a whole code of 4 bits or less is the place in a table of 16
// that a vector permutation looks up, made once a group; others are computed for each tile of a few
// rows. For more rows they are decoded to memory, some panels at a time, and so are those of
// permuted columns, and all where there is no AVX-512.

#include <cmath>
#include <cstring>
#include <vector>

#include "linear.h"
#include "numbers.h"
#include "parallel.h"

namespace {

constexpr int kLine = 64;               // bytes of an output in a chunk
constexpr int64_t kKept = 256 << 10;    // numbers of rows, for the second-level cache
constexpr int64_t kDecoded = 256 << 10;  // bytes of decoded panels, for the same
constexpr int64_t kAhead = 4 << 10;     // bytes of codes
constexpr int64_t kGrain = 512 << 10;   // products worth a thread
constexpr int64_t kFew = 8;             // rows, up to which numbers that no table has are computed
constexpr int kBlock = 512;             // columns that are decoded of one output after the other

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

// Numbers of a panel, [16 outputs, inputs], in the places that columns have in x.
template <int kBits, int kCodes, int kPlain>
void decode(const Packed& p, int64_t panel, Plain<kPlain>* to) {
  constexpr int64_t kWide = 512 / kBits;
  const uint8_t* codes = p.codes + panel * p.panel_bytes;
  BlockGrids block;
  for (int64_t from = 0; from < p.inputs; from += kBlock) {
    const int64_t end = std::min<int64_t>(from + kBlock, p.inputs);
    block.read(p, panel, from, end);
    for (int r = 0; r < kPanel; ++r)
      for (int64_t k = from; k < end; k += kStep) {
        const uint8_t* line = codes + (k / kWide * kPanel + r) * kLine;
        Values<kBits, kCodes, kPlain> values;
        values.read(p, block.grids[block.of[(k - from) / kStep]], r);
        Plain<kPlain> found[kStep];
        const int j = k % kWide / kStep;
        for (int part = 0; part < kParts; ++part) {
          Ints packed;
          std::memcpy(&packed, line + 4 * kRows * part, sizeof packed);
          store_exact(values.at(packed, j), found + kRows * part, kRows);
        }
        Plain<kPlain>* row = to + r * p.inputs;
        const int64_t left = std::min<int64_t>(kStep, end - k);
        if (p.columns) for (int64_t i = 0; i < left; ++i) row[p.columns[k + i]] = found[i];
        else if (left == kStep) std::memcpy(row + k, found, sizeof found);
        else std::memcpy(row + k, found, left * sizeof *found);
      }
  }
}

// Panels [from, to), decoded a few at a time.
template <int kBits, int kCodes, int kPlain>
void decoded(const Packed& p, int64_t from, int64_t to) {
  using T = Plain<kPlain>;
  static thread_local std::vector<T> weight;
  const int64_t each = kPanel * p.inputs;
  const int64_t most = std::max<int64_t>(1, kDecoded / int64_t{sizeof(T)} / each);
  if (static_cast<int64_t>(weight.size()) < most * each) weight.resize(most * each);
  for (int64_t first = from; first < to; first += most) {
    const int64_t end = std::min(to, first + most), output = first * kPanel;
    for (int64_t panel = first; panel < end; ++panel)
      decode<kBits, kCodes, kPlain>(p, panel, weight.data() + (panel - first) * each);
    const int64_t width = std::min(end * kPanel, p.outputs) - output;
    const Linear job{p.x, weight.data(), p.bias ? p.bias + output : nullptr, p.out + output,
                     p.rows, p.inputs, width, p.stride, p.out_stride, kPlain, 1};
    linear_rows(&job);
  }
}

// Rows of the tile that begins where so many are left: 8, 4, 2 or 1.
inline int height(int64_t left) { return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

// Some rows as tiles read them: those of a tile lie together, [16 columns][row][16], then zeros.
struct Near {
  int64_t places;
  std::vector<float> x;

  void read(const Packed& p) {
    constexpr int64_t kLeast = kLine / sizeof(float);  // so that vectors begin with a line
    places = (p.inputs + kStep - 1) / kStep * kStep;
    x.assign(p.rows * places + kLeast, 0.0f);
    for (int64_t row = 0; row < p.rows;) {
      const int high = height(p.rows - row);
      for (int i = 0; i < high; ++i)
        for (int64_t k = 0; k < p.inputs; k += kStep)
          std::copy_n(p.x + (row + i) * p.stride + k, std::min<int64_t>(kStep, p.inputs - k),
                      at(row) + (k * high + kStep * i));
      row += high;
    }
  }

  float* at(int64_t row) {
    const auto begin = (reinterpret_cast<uintptr_t>(x.data()) + kLine - 1) / kLine * kLine;
    return reinterpret_cast<float*>(begin) + row * places;
  }
};

#ifdef __AVX512F__
// Into a register, once: GCC would read it anew for every product.
inline Vec load_once(const float* from) { return *reinterpret_cast<const volatile Vec*>(from); }

// Grids of a chunk's groups.
template <int kBits>
struct Grids {
  static constexpr int kEach = 32 / kBits;
  bool fresh[kEach];  // whether a step of 16 columns begins a group, or is the first
  Grid of[kEach];     // the fresh ones'

  void read(const Packed& p, int64_t panel, int64_t k, int steps, bool whole) {
    for (int j = 0; j < steps; ++j) {
      fresh[j] = j == 0 || (!whole && (k + kStep * j) % p.group == 0);
      if (fresh[j]) of[j].read(p, panel, (k + kStep * j) / p.group);
    }
  }
};

// kHigh rows and kRows / kHigh outputs of a panel. kOne: a chunk has one group.
template <typename Numbers, int kHigh, bool kOne>
void tile(const Packed& p, const float* x, int64_t row, int64_t panel, int first) {
  constexpr int kWidth = kRows / kHigh, kEach = 32 / Numbers::kBits;
  constexpr int kOnce = kWidth <= 4 ? kWidth : 1;  // outputs that a loaded number of x is for
  Vec sums[kRows] = {};
  const uint8_t* codes = p.codes + panel * p.panel_bytes + first * kLine;
  Grids<Numbers::kBits> grids;
  for (int64_t k = 0; k < p.inputs; k += kStep * kEach, codes += kPanel * kLine) {
    const int steps = std::min<int64_t>(kEach, (p.inputs - k + kStep - 1) / kStep);
    grids.read(p, panel, k, steps, kOne);
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; r += kOnce) {
      Ints packed[kOnce];
      Numbers numbers[kOnce];
#pragma GCC unroll 4
      for (int q = 0; q < kOnce; ++q) {
        std::memcpy(&packed[q], codes + (r + q) * kLine, kLine);
        __builtin_prefetch(codes + (r + q) * kLine + kAhead);
        numbers[q].read(p, grids.of[0], first + r + q);
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
      if (kOne && steps == kEach) {
#pragma GCC unroll 8
        for (int j = 0; j < kEach; ++j) add(j);
        continue;
      }
#pragma GCC unroll 1
      for (int j = 0; j < steps; ++j) {
        if (j && grids.fresh[j])
          for (int q = 0; q < kOnce; ++q) numbers[q].read(p, grids.of[j], first + r + q);
        add(j);
      }
    }
  }
  const Vec total = totals(sums);
  const int64_t output = panel * kPanel + first;
  const int64_t width = std::min<int64_t>(kWidth, p.outputs - output);
  for (int i = 0; i < kHigh; ++i)
    for (int j = 0; j < width; ++j)
      p.out[(row + i) * p.out_stride + output + j] =
          total[i * kWidth + j] + (p.bias ? p.bias[output + j] : 0.0f);
}

template <typename Numbers, int kHigh>
void whole(const Packed& p, const float* x, int64_t row, int64_t panel) {
  const bool one = p.group % (512 / Numbers::kBits) == 0 || p.group >= p.inputs;
  for (int first = 0; first < kPanel; first += kRows / kHigh)
    one ? tile<Numbers, kHigh, true>(p, x, row, panel, first)
        : tile<Numbers, kHigh, false>(p, x, row, panel, first);
}

// Panels [from, to), a tile of rows after the other.
template <typename Numbers>
void direct(const Packed& p, Near& near, int64_t from, int64_t to) {
  for (int64_t panel = from; panel < to; ++panel)
    for (int64_t row = 0; row < p.rows;) {
      const int high = height(p.rows - row);
      const float* x = near.at(row);
      if (high == 8) whole<Numbers, 8>(p, x, row, panel);
      if (high == 4) whole<Numbers, 4>(p, x, row, panel);
      if (high == 2) whole<Numbers, 2>(p, x, row, panel);
      if (high == 1) whole<Numbers, 1>(p, x, row, panel);
      row += high;
    }
}
#endif

template <int kBits, int kCodes, int kPlain>
void panels_of(const Packed& p, [[maybe_unused]] Near* near, int64_t from, int64_t to) {
#ifdef __AVX512F__
  if (near) {
    if constexpr (kCodes == kWhole && kBits <= 4) return direct<Table<kBits>>(p, *near, from, to);
    else return direct<Values<kBits, kCodes, kPlain>>(p, *near, from, to);
  }
#endif
  decoded<kBits, kCodes, kPlain>(p, from, to);
}

template <int kBits, int kCodes>
void panels(const Packed& p, Near* near, int64_t from, int64_t to) {
  if (p.plain_kind == kBFloat16) panels_of<kBits, kCodes, kBFloat16>(p, near, from, to);
  else if (p.plain_kind == kFloat16) panels_of<kBits, kCodes, kFloat16>(p, near, from, to);
  else panels_of<kBits, kCodes, kFloat32>(p, near, from, to);
}

}  // namespace

extern "C" void packed_rows(const Packed* p) {
  static thread_local Near rows;
  Packed part = *p;
  Near* near = nullptr;
#ifdef __AVX512F__
  const bool table = p->codes_are == kWhole && p->bits <= 4;
  if (!p->columns && (table || p->rows <= kFew)) near = &rows;
#endif
  const int64_t strip = near ? std::max<int64_t>(8, kKept / p->inputs / 8 * 8) : p->rows;
  for (int64_t row = 0; row < p->rows; row += strip) {
    part.x = p->x + row * p->stride;
    part.out = p->out + row * p->out_stride;
    part.rows = std::min(strip, p->rows - row);
    if (near) near->read(part);
    const int64_t grain = 1 + kGrain / (part.rows * p->inputs * kPanel + 1);
    in_parallel(p->threads, p->panels(), grain, [&](int64_t from, int64_t to) {
      if (p->codes_are == kE4M3) panels<8, kE4M3>(part, near, from, to);
      else if (p->codes_are == kE2M1) panels<4, kE2M1>(part, near, from, to);
      else if (p->bits == 2) panels<2, kWhole>(part, near, from, to);
      else if (p->bits == 4) panels<4, kWhole>(part, near, from, to);
      else panels<8, kWhole>(part, near, from, to);
    });
  }
}
