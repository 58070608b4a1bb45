// Rows times codes, bit for bit as linear.cpp has it of the decoded weight.
//
// Of 16 outputs and a chunk of columns (512 / bits) each output has 64 bytes: lane l of 16 holds of
// its columns those that are l beyond a multiple of 16. Sums are in linear.cpp's lanes, so products
// take decoded numbers from registers: a code of 4 bits or less is the place in a table of 16 that
// a vector permutation looks up, made once a group. Other codes, those of permuted columns, and all
// where there is no AVX-512, are decoded to memory, a panel at a time.

#include <cmath>
#include <cstring>
#include <vector>

#include "dots.h"
#include "linear.h"
#include "panels.h"
#include "parallel.h"

namespace {

constexpr int kLine = 64;             // bytes of an output in a chunk
constexpr int64_t kKept = 256 << 10;  // numbers of rows, for the second-level cache
constexpr int64_t kAhead = 4 << 10;   // bytes of codes
constexpr int64_t kGrain = 512 << 10;   // products worth a thread

// Scales and zeros of a group of a panel.
struct Grid {
  float scale[kPanel], zero[kPanel];

  void read(const Packed& p, int64_t panel, int64_t group, int middle) {
    for (int part = 0; part < kPanel; part += kRows) {
      const Vec scales = scales_at(p, panel, group, part);
      Vec zeros = splat(middle);
      if (p.zeros) zeros += load_stored(zeros_at(p, panel, group, part), kRows);
      std::memcpy(scale + part, &scales, sizeof scales);
      std::memcpy(zero + part, &zeros, sizeof zeros);
    }
  }
};

// Rounded to the dtype that dense weights have.
template <int kPlain>
inline Vec plain(Vec x) {
  if (kPlain == kBFloat16) return nearest_of(x, static_cast<const BFloat16*>(nullptr));
  if (kPlain == kFloat16) return nearest_of(x, static_cast<const Float16*>(nullptr));
  return x;
}

// Numbers of an output's group from its codes.
template <int kBits, int kPlain>
struct Values {
  static constexpr int32_t kMask = (1 << kBits) - 1;
  Vec scale, zero;

  void read(const Grid& grid, int output) {
    scale = splat(grid.scale[output]);
    zero = splat(grid.zero[output]);
  }

  // Of the columns 16 * j on.
  Vec at(Ints codes, int j) const {
    const Ints code = (codes >> (kBits * j)) & kMask;
    return plain<kPlain>((__builtin_convertvector(code, Vec) - zero) * scale);
  }
};

// Numbers of a panel, [16 outputs, inputs], in the places that columns have in x.
template <int kBits, int kPlain>
void decode(const Packed& p, int64_t panel, float* to) {
  constexpr int64_t kWide = 512 / kBits;
  const uint8_t* codes = p.codes + panel * p.panel_bytes;
  Grid grid;
  int64_t group = -1;
  Values<kBits, kPlain> values[kPanel];
  for (int64_t k = 0; k < p.inputs; k += kWide, codes += kPanel * kLine)
    for (int j = 0; j < 32 / kBits && k + kStep * j < p.inputs; ++j) {
      const int64_t column = k + kStep * j, left = std::min<int64_t>(kStep, p.inputs - column);
      if (column / p.group != group) {
        group = column / p.group;
        grid.read(p, panel, group, 1 << (kBits - 1));
        for (int r = 0; r < kPanel; ++r) values[r].read(grid, r);
      }
      for (int r = 0; r < kPanel; ++r) {
        float found[kStep];
        for (int part = 0; part < kParts; ++part) {
          Ints packed;
          std::memcpy(&packed, codes + r * kLine + 4 * kRows * part, sizeof packed);
          const Vec x = values[r].at(packed, j);
          std::memcpy(found + kRows * part, &x, sizeof x);
        }
        float* row = to + r * p.inputs;
        if (p.columns) for (int64_t i = 0; i < left; ++i) row[p.columns[column + i]] = found[i];
        else std::memcpy(row + column, found, left * sizeof(float));
      }
    }
}

// Panels [from, to), decoded one at a time.
template <int kBits, int kPlain>
void decoded(const Packed& p, int64_t from, int64_t to) {
  std::vector<float> weight(kPanel * p.inputs);
  for (int64_t panel = from; panel < to; ++panel) {
    decode<kBits, kPlain>(p, panel, weight.data());
    const int64_t output = panel * kPanel, width = std::min<int64_t>(kPanel, p.outputs - output);
    const Linear job{p.x, weight.data(), p.bias ? p.bias + output : nullptr, p.out + output,
                     p.rows, p.inputs, width, p.stride, p.out_stride, kFloat32, 1};
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
// All numbers that codes of an output's group can be, one a lane; of 2 bits four times.
template <int kBits>
inline Vec table_of(const Packed& p, const Grid& grid, int output) {
  const Ints places{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec codes = __builtin_convertvector(places & ((1 << kBits) - 1), Vec);
  const Vec x = (codes - splat(grid.zero[output])) * splat(grid.scale[output]);
  if (p.plain_kind == kBFloat16) return plain<kBFloat16>(x);
  return p.plain_kind == kFloat16 ? plain<kFloat16>(x) : x;
}

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
      if (fresh[j]) of[j].read(p, panel, (k + kStep * j) / p.group, 1 << (kBits - 1));
    }
  }
};

// kHigh rows and kRows / kHigh outputs of a panel. kWhole: a chunk has one group.
template <int kBits, int kHigh, bool kWhole>
void tile(const Packed& p, const float* x, int64_t row, int64_t panel, int first) {
  constexpr int kWidth = kRows / kHigh, kEach = 32 / kBits;
  constexpr int kOnce = kWidth <= 4 ? kWidth : 1;  // outputs that a loaded number of x is for
  Vec sums[kRows] = {};
  const uint8_t* codes = p.codes + panel * p.panel_bytes + first * kLine;
  Grids<kBits> grids;
  for (int64_t k = 0; k < p.inputs; k += kStep * kEach, codes += kPanel * kLine) {
    const int steps = std::min<int64_t>(kEach, (p.inputs - k + kStep - 1) / kStep);
    grids.read(p, panel, k, steps, kWhole);
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; r += kOnce) {
      Ints packed[kOnce];
      Vec table[kOnce];
#pragma GCC unroll 4
      for (int q = 0; q < kOnce; ++q) {
        std::memcpy(&packed[q], codes + (r + q) * kLine, kLine);
        __builtin_prefetch(codes + (r + q) * kLine + kAhead);
        table[q] = table_of<kBits>(p, grids.of[0], first + r + q);
      }
      const auto add = [&](int j) {
        Vec b[kOnce];
#pragma GCC unroll 4
        for (int q = 0; q < kOnce; ++q)
          b[q] = (Vec)_mm512_permutexvar_ps((__m512i)(packed[q] >> (kBits * j)), (__m512)table[q]);
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
      if (kWhole && steps == kEach) {
#pragma GCC unroll 8
        for (int j = 0; j < kEach; ++j) add(j);
        continue;
      }
#pragma GCC unroll 1
      for (int j = 0; j < steps; ++j) {
        if (j && grids.fresh[j])
          for (int q = 0; q < kOnce; ++q)
            table[q] = table_of<kBits>(p, grids.of[j], first + r + q);
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

template <int kBits, int kHigh>
void whole(const Packed& p, const float* x, int64_t row, int64_t panel) {
  const bool one = p.group % (512 / kBits) == 0 || p.group >= p.inputs;
  for (int first = 0; first < kPanel; first += kRows / kHigh)
    one ? tile<kBits, kHigh, true>(p, x, row, panel, first)
        : tile<kBits, kHigh, false>(p, x, row, panel, first);
}

// Panels [from, to), a tile of rows after the other.
template <int kBits>
void direct(const Packed& p, Near& near, int64_t from, int64_t to) {
  for (int64_t panel = from; panel < to; ++panel)
    for (int64_t row = 0; row < p.rows;) {
      const int high = height(p.rows - row);
      const float* x = near.at(row);
      if (high == 8) whole<kBits, 8>(p, x, row, panel);
      if (high == 4) whole<kBits, 4>(p, x, row, panel);
      if (high == 2) whole<kBits, 2>(p, x, row, panel);
      if (high == 1) whole<kBits, 1>(p, x, row, panel);
      row += high;
    }
}
#endif

template <int kBits>
void panels(const Packed& p, Near* near, int64_t from, int64_t to) {
#ifdef __AVX512F__
  if constexpr (kBits <= 4)
    if (near) return direct<kBits>(p, *near, from, to);
#endif
  if (p.plain_kind == kBFloat16) decoded<kBits, kBFloat16>(p, from, to);
  else if (p.plain_kind == kFloat16) decoded<kBits, kFloat16>(p, from, to);
  else decoded<kBits, kFloat32>(p, from, to);
}

}  // namespace

extern "C" void packed_rows(const Packed* p) {
  static thread_local Near rows;
  Packed part = *p;
  Near* near = nullptr;
#ifdef __AVX512F__
  if (!p->columns && p->bits <= 4) near = &rows;
#endif
  const int64_t strip = near ? std::max<int64_t>(8, kKept / p->inputs / 8 * 8) : p->rows;
  for (int64_t row = 0; row < p->rows; row += strip) {
    part.x = p->x + row * p->stride;
    part.out = p->out + row * p->out_stride;
    part.rows = std::min(strip, p->rows - row);
    if (near) near->read(part);
    const int64_t grain = 1 + kGrain / (part.rows * p->inputs * kPanel + 1);
    in_parallel(p->threads, p->panels(), grain, [&](int64_t from, int64_t to) {
      if (p->bits == 2) panels<2>(part, near, from, to);
      else if (p->bits == 4) panels<4>(part, near, from, to);
      else panels<8>(part, near, from, to);
    });
  }
}
