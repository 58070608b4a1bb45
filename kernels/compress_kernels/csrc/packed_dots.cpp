// Rows, rounded to whole numbers, times codes: whole sums a run of columns, one fma a run.
//
// Inputs are rounded to 8 or 16 bits, a row and run of columns together: to 127, or to 32512 in two
// planes of bytes (256 * high + low). A run is a group of the weight, or 128 columns of it: sums of
// codes times inputs then fit into 32 bits. They are exact, and a row adds its runs in the order of
// the columns, so it has the same bits beside any others and on every instruction set.
//
// A panel of 16 outputs is one stream of bytes: read side by side, several fell to half of the
// bandwidth. Of 16 columns it has four vectors of bytes, one of four columns an output each.

#include <cmath>
#include <cstring>
#include <vector>

#include "dots.h"
#include "panels.h"
#include "parallel.h"

namespace {

constexpr int64_t kRun = 128;              // columns, at most
constexpr int kDots = kStep / 4;           // of an output in a step
constexpr int64_t kFew = 16;               // rows, up to which codes are unpacked for each tile
constexpr int64_t kKept = 512 << 10;       // bytes of rounded rows, for the second-level cache
constexpr int64_t kAhead = 4 << 10;        // bytes of codes
constexpr int64_t kGrain = 8 << 20;        // products worth a thread
constexpr float kLeast = 1e-30f;           // inputs that are smaller are 0

// Rows as tiles read them: those of a tile lie together, [4 columns][row][plane] of 4 bytes.
struct Rounded {
  int64_t places, runs;          // columns with the padding; runs of a row
  int64_t first, count;          // rows
  std::vector<int8_t> bytes;     // [rows, planes * places]
  std::vector<float> scales;     // [rows, runs]
  std::vector<int32_t> sums;     // [rows, runs], of the whole numbers
};

// Rows of the tile that begins at a row: 8, 4, 2 or 1.
inline int height(int64_t left, int most) {
  int high = most;
  while (high > left) high /= 2;
  return high;
}

constexpr int highest(int planes) { return planes == 2 ? 4 : 8; }

// What a run is divided by, NaN where a number of it is not finite, 0 where it is nearly 0.
inline float top_of(const float* x, int64_t count) {
  int32_t top = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    top = std::max(top, bits & 0x7fffffff);
  }
  float found;
  std::memcpy(&found, &top, sizeof found);
  if (!(found < __builtin_inff())) return __builtin_nanf("");
  return found < kLeast ? 0.0f : found;
}

// A run of a row to whole numbers; their sum.
inline int32_t round_run(const float* x, int64_t count, float inverse, int32_t* whole) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    whole[i] = static_cast<int32_t>(__builtin_rintf(x[i] * inverse));
    sum += whole[i];
  }
  return sum;
}

// Bytes of a run, planes one after the other, to where the tile of `high` rows reads them.
inline void place(const int32_t* whole, int64_t count, int planes, int high, int8_t* to) {
  int8_t bytes[2][kRun];
  for (int64_t i = 0; i < count; ++i) {
    const int32_t upper = (whole[i] + 128) >> 8;
    bytes[0][i] = static_cast<int8_t>(planes == 2 ? upper : whole[i]);
    bytes[1][i] = static_cast<int8_t>(whole[i] - 256 * upper);
  }
  const int64_t apart = 4 * static_cast<int64_t>(high) * planes;
  for (int plane = 0; plane < planes; ++plane)
    for (int64_t c = 0; c < count; c += 4)
      std::memcpy(to + c / 4 * apart + 4 * plane, bytes[plane] + c, 4);
}

struct Sizes { int64_t run; float largest; };

// One row, in place `index` of a tile of `high` rows that begins at `bytes`.
void round_row(const Packed& p, const float* x, const Sizes& sizes, Rounded& into, int64_t row,
               int index, int high, int8_t* bytes) {
  int32_t whole[kRun];
  for (int64_t r = 0; r < into.runs; ++r) {
    const int64_t at = r * sizes.run;
    const int64_t count = std::min(sizes.run, into.places - at);
    const float top = top_of(x + at, count);
    const bool some = top > 0;
    const float inverse = some ? sizes.largest / top : 0.0f;
    into.scales[row * into.runs + r] = top / sizes.largest;
    int32_t& sum = into.sums[row * into.runs + r];
    if (some) sum = round_run(x + at, count, inverse, whole);
    else { sum = 0; std::fill_n(whole, count, 0); }
    place(whole, count, p.planes, high, bytes + 4 * (at / 4 * high + index) * p.planes);
  }
}

// Columns beyond the last are 0.
void round_rows(const Packed& p, const Sizes& sizes, Rounded& into) {
  const int64_t width = into.places * p.planes, count = into.count;
  into.bytes.resize(count * width);
  into.scales.resize(count * into.runs);
  into.sums.resize(count * into.runs);
  const int64_t grain = 1 + kGrain / 64 / into.places;
  const int64_t tiles = (count + highest(p.planes) - 1) / highest(p.planes);
  in_parallel(p.threads, tiles, grain, [&](int64_t first, int64_t last) {
    std::vector<float> padded(into.places);
    const int64_t stop = std::min(last * highest(p.planes), count);
    for (int64_t row = first * highest(p.planes); row < stop;) {
      const int high = height(count - row, highest(p.planes));
      for (int i = 0; i < high; ++i) {
        const float* x = p.x + (into.first + row + i) * p.stride;
        if (p.columns) for (int64_t k = 0; k < p.inputs; ++k) padded[k] = x[p.columns[k]];
        else std::memcpy(padded.data(), x, p.inputs * sizeof(float));
        round_row(p, padded.data(), sizes, into, row + i, i, high,
                  into.bytes.data() + row * width);
      }
      row += high;
    }
  });
}

// Four vectors of bytes: of each output (lane) columns 0 to 3, 4 to 7, 8 to 11, 12 to 15 of a step.
template <int kBits>
inline void load_step(const uint8_t* from, Ints* codes) {
  constexpr int kEach = 8 / kBits;  // codes of a byte
  constexpr int32_t kMask = kBits == 8 ? -1 : 0x01010101 * ((1 << kBits % 8) - 1);
#pragma GCC unroll 4
  for (int v = 0; v < kDots / kEach; ++v) {
    Ints packed;
    std::memcpy(&packed, from + v * kPanel * 4, sizeof packed);
    if (kBits == 8) codes[v] = packed;
    else
#pragma GCC unroll 4
      for (int j = 0; j < kEach; ++j)
        codes[v * kEach + j] = (j ? packed >> (kBits * j) : packed) & kMask;
  }
}

// A tile's part of the job.
struct Tile {
  const uint8_t* codes;  // of the panel
  int64_t panel, row;
  int32_t middle;        // what was added to codes, so that the least is 0
};

// Sums of a run, of every row and plane of a tile, in chains, since one would wait for itself.
template <int kPlanes, int kHigh>
struct Run {
  static constexpr int kSums = kHigh * kPlanes;
  static constexpr int kChains = kSums >= 8 ? 1 : kSums >= 4 ? 2 : 4;
  Ints sums[kSums][kChains];

  void add(const Ints* step, const int8_t* bytes) {
#pragma GCC unroll 4
    for (int q = 0; q < kDots; ++q)
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) {
        int32_t four;
        std::memcpy(&four, bytes + 4 * (q * kSums + i), 4);
        Ints& sum = sums[i][q % kChains];
        sum = dot(sum, step[q], every(four));
      }
  }

  Ints of(int row) const {
    Ints whole{};
#pragma GCC unroll 2
    for (int plane = 0; plane < kPlanes; ++plane) {
      whole <<= 8;
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) whole += sums[row * kPlanes + plane][c];
    }
    return whole;
  }
};

// kHigh rows and the outputs [first, first + kRows) of a panel.
template <int kBits, int kPlanes, int kHigh>
void tile(const Packed& p, const Rounded& in, const Sizes& sizes, const Tile& t, int first) {
  constexpr int kBytes = kStep * kPanel * kBits / 8;  // of a step of a panel
  Vec totals[kHigh] = {};
  const uint8_t* codes = t.codes + 4 * first;
  const int8_t* bytes = in.bytes.data() + t.row * in.places * kPlanes;
  const float* scales = in.scales.data() + t.row * in.runs;
  const int32_t* sums = in.sums.data() + t.row * in.runs;
  for (int64_t r = 0; r < in.runs; ++r) {
    const int64_t at = r * sizes.run, steps = std::min(sizes.run, in.places - at) / kStep;
    Run<kPlanes, kHigh> run{};
    for (int64_t s = 0; s < steps; ++s) {
      Ints step[kDots];
#pragma GCC unroll 4
      for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(codes + line + kAhead);
      load_step<kBits>(codes, step);
      run.add(step, bytes);
      codes += kBytes;
      bytes += 4 * kDots * kHigh * kPlanes;
    }
    const int64_t group = at / p.group;
    const Vec scale = scales_at(p, t.panel, group, first);
    Ints zero{};
    if (p.zeros)
      zero = __builtin_convertvector(
          load_raw<Bytes>(zeros_at(p, t.panel, group, first), kRows), Ints);
#pragma GCC unroll 8
    for (int i = 0; i < kHigh; ++i) {
      const int32_t sum = sums[i * in.runs + r];
      Ints whole = run.of(i) - every(t.middle * sum);
      if (p.zeros) whole -= zero * every(sum);
      totals[i] = add_product(totals[i], __builtin_convertvector(whole, Vec),
                              scale * splat(scales[i * in.runs + r]));
    }
  }
  const int64_t output = t.panel * kPanel + first;
  const int64_t width = std::min<int64_t>(kRows, p.outputs - output);
  if (width <= 0) return;
  const Vec bias = p.bias ? load_stored(p.bias + output, width) : Vec{};
  float* out = p.out + (in.first + t.row) * p.out_stride + output;
  for (int i = 0; i < kHigh; ++i) store_raw(totals[i] + bias, out + i * p.out_stride, width);
}

// All outputs of a panel, as many at once as a register has lanes.
template <int kBits, int kPlanes, int kHigh>
void whole(const Packed& p, const Rounded& in, const Sizes& sizes, const Tile& t) {
  for (int part = 0; part < kParts; ++part)
    tile<kBits, kPlanes, kHigh>(p, in, sizes, t, part * kRows);
}

template <int kBits, int kPlanes>
void rows(const Packed& p, const Rounded& in, const Sizes& sizes, Tile t) {
  for (t.row = 0; t.row < in.count;) {
    const int high = height(in.count - t.row, highest(kPlanes));
    if constexpr (highest(kPlanes) == 8)
      if (high == 8) whole<kBits, kPlanes, 8>(p, in, sizes, t);
    if (high == 4) whole<kBits, kPlanes, 4>(p, in, sizes, t);
    if (high == 2) whole<kBits, kPlanes, 2>(p, in, sizes, t);
    if (high == 1) whole<kBits, kPlanes, 1>(p, in, sizes, t);
    t.row += high;
  }
}

// Codes of 2 or 4 bits of a panel to bytes.
template <int kBits>
void unpack(const uint8_t* codes, int64_t bytes, uint8_t* to) {
  constexpr int kBytes = kStep * kPanel * kBits / 8;
  for (int64_t at = 0; at < bytes; at += kBytes, to += kStep * kPanel)
    for (int part = 0; part < kParts; ++part) {
      __builtin_prefetch(codes + at + part * kBytes / kParts + kAhead / 4);
      Ints step[kDots];
      load_step<kBits>(codes + at + 4 * kRows * part, step);
      for (int q = 0; q < kDots; ++q)
        std::memcpy(to + 4 * (q * kPanel + kRows * part), &step[q], sizeof step[q]);
    }
}

// Panels [from, to): few rows read packed codes, many what was unpacked for all of them.
template <int kBits, int kPlanes>
void panels(const Packed& p, const Rounded& in, const Sizes& sizes, int64_t from, int64_t to) {
  const bool few = kBits == 8 || in.count <= kFew;
  std::vector<uint8_t> bytes(few ? 0 : kPanel * in.places);
  for (int64_t panel = from; panel < to; ++panel) {
    const uint8_t* codes = p.codes + panel * p.panel_bytes;
    Tile t{few ? codes : bytes.data(), panel, 0, 1 << (kBits - 1)};
    if (few) {
      rows<kBits, kPlanes>(p, in, sizes, t);
      continue;
    }
    unpack<kBits>(codes, p.panel_bytes, bytes.data());
    rows<8, kPlanes>(p, in, sizes, t);
  }
}

template <int kPlanes>
void panels_of(const Packed& p, const Rounded& in, const Sizes& sizes, int64_t from, int64_t to) {
  if (p.bits == 2) panels<2, kPlanes>(p, in, sizes, from, to);
  else if (p.bits == 4) panels<4, kPlanes>(p, in, sizes, from, to);
  else panels<8, kPlanes>(p, in, sizes, from, to);
}

}  // namespace

extern "C" void packed_dots(const Packed* p) {
  static thread_local Rounded in;
  // A group of all columns need not end with a step.
  const int64_t run = p->group >= p->inputs ? kRun : std::min(kRun, p->group);
  const Sizes sizes{run, p->planes == 2 ? 32512.0f : 127.0f};
  in.places = (p->inputs + kStep - 1) / kStep * kStep;
  in.runs = (in.places + sizes.run - 1) / sizes.run;
  const int64_t most = kKept / (in.places * p->planes) / 8 * 8;
  const int64_t strip = std::max(2 * kFew, most);
  for (in.first = 0; in.first < p->rows; in.first += strip) {
    in.count = std::min(strip, p->rows - in.first);
    round_rows(*p, sizes, in);
    const Rounded& rounded = in;
    const int64_t grain = 1 + kGrain / (in.count * in.places * kPanel + 1);
    in_parallel(p->threads, p->panels(), grain, [&](int64_t from, int64_t to) {
      p->planes == 2 ? panels_of<2>(*p, rounded, sizes, from, to)
                     : panels_of<1>(*p, rounded, sizes, from, to);
    });
  }
}
