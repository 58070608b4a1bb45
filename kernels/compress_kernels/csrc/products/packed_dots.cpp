// Rows, rounded to whole numbers, times codes: whole sums a run of columns, one fma a run.
//
// A run is a group of the weight, or 128 columns of it where the math rounds inputs; where a scheme
// rounds whole rows it is the group: sums of codes times inputs then fit into 32 bits. They are
// exact, and a row adds its runs in the order of the columns, so it has the same bits beside any
// others and on every instruction set. E2M1 codes count twice, which are whole numbers; a minimum is
// one more fma behind its run; inputs that are left as they are follow in the order of columns, one
// fma each.
//
// A panel of 16 outputs is one stream of bytes: read side by side, several fell to half of the
// bandwidth, where rows are few. Of 16 columns it has four vectors of bytes, one of four columns an
// output each.

#include <cmath>
#include <cstring>
#include <vector>

#include "panels.h"
#include "parallel.h"
#include "rounding.h"

namespace {

constexpr int kDots = kStep / 4;           // of an output in a step
constexpr int64_t kKept = 512 << 10;       // bytes of rounded rows, for the second-level cache
constexpr int64_t kAhead = 4 << 10;        // bytes of codes
constexpr int kPair = kRows == 16 ? 2 : 1;  // panels side by side, of many rows
constexpr int kTwice = 100, kNear = 101;   // in place of 4 bits: E2M1 and IQ4

constexpr int bits_of(int of) { return of > 8 ? 4 : of; }

// What nibbles stand for, raised so that none is below 0: E2M1 numbers twice, levels of IQ4.
alignas(16) constexpr uint8_t kTwices[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                             12, 11, 10, 9,  8,  6,  4,  0};
alignas(16) constexpr uint8_t kNears[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                            128, 140, 152, 165, 180, 196, 216, 240};

// Bytes from 0 to 15, looked up.
inline Ints looked_up(const uint8_t* table, Ints nibbles) {
#if defined(__AVX512BW__)
  const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)nibbles);
#elif defined(__AVX2__)
  const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), (__m256i)nibbles);
#else
  uint8_t bytes[sizeof nibbles];
  std::memcpy(bytes, &nibbles, sizeof nibbles);
  for (uint8_t& byte : bytes) byte = table[byte];
  std::memcpy(&nibbles, bytes, sizeof nibbles);
  return nibbles;
#endif
}

// Four vectors of bytes: of each output (lane) columns 0 to 3, 4 to 7, 8 to 11, 12 to 15 of a step.
template <int kOf>
inline void load_step(const uint8_t* from, Ints* codes) {
  constexpr int kBits = bits_of(kOf);
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
  if constexpr (kOf > 8)
#pragma GCC unroll 4
    for (int q = 0; q < kDots; ++q) codes[q] = looked_up(kOf == kTwice ? kTwices : kNears, codes[q]);
}

// A tile's part of the job.
struct Tile {
  const uint8_t* codes;  // of the panel
  int64_t panel, row;
  int64_t next = 0;  // bytes from its codes to those of the panel behind it
  // Of each panel [groups, 16], and minima behind them, or null: not made yet.
  const float* scales = nullptr;
};

// Scales and minima of a panel, made once for all tiles of its rows: 64 rows with 768 x 256 in Q4_K
// took 101 us in place of 106.
void read_panel(const Packed& p, int64_t panel, float* to) {
  const GroupSpan all{panel, 0, p.groups, 0};
  read_groups<kPanel>(scales_of(p), all, to);
  if (p.minima) read_groups<kPanel>(minima_of(p), all, to + p.groups * kPanel);
}

// Sums of a run, of every row and plane of a tile and each of its panels, in chains, since one would
// wait for itself.
template <int kPlanes, int kHigh, int kWide>
struct Run {
  static constexpr int kSums = kHigh * kPlanes, kAll = kSums * kWide;
  static constexpr int kChains = kAll >= 8 ? 1 : kAll >= 4 ? 2 : 4;
  Ints sums[kWide][kSums][kChains] = {};

  // raised: of each row, `stride` apart, what its sum begins with.
  Run(const int32_t* raised, int64_t stride) {
#pragma GCC unroll 8
    for (int i = 0; i < kHigh; ++i)
#pragma GCC unroll 2
      for (int w = 0; w < kWide; ++w)
        sums[w][i * kPlanes + kPlanes - 1][0] = every(raised[i * stride]);
  }

  void add(const Ints (*step)[kDots], const int8_t* bytes) {
#pragma GCC unroll 4
    for (int q = 0; q < kDots; ++q)
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) {
        int32_t four;
        std::memcpy(&four, bytes + 4 * (q * kSums + i), 4);
        const Ints inputs = every(four);
#pragma GCC unroll 2
        for (int w = 0; w < kWide; ++w) {
          Ints& sum = sums[w][i][q % kChains];
          sum = dot(sum, step[w][q], inputs);
        }
      }
  }

  Ints of(int w, int row) const {
    Ints whole{};
#pragma GCC unroll 2
    for (int plane = 0; plane < kPlanes; ++plane) {
      whole <<= 8;
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) whole += sums[w][row * kPlanes + plane][c];
    }
    return whole;
  }
};

// Four columns of each output, `place` among them.
template <int kOf>
inline Ints load_four(const uint8_t* codes, int64_t place) {
  constexpr int kBytes = kStep * kPanel * bits_of(kOf) / 8;
  const uint8_t* from = codes + place / kStep * kBytes;
  if constexpr (kOf == 8) {
    Ints four;
    std::memcpy(&four, from + place % kStep / 4 * kPanel * 4, sizeof four);
    return four;
  }
  Ints step[kDots];
  load_step<kOf>(from, step);
  return step[place % kStep / 4];
}

// What a row leaves as it is, times the weight's columns.
template <int kOf>
Vec add_outliers(const Packed& p, const Tile& t, int first, const Outliers& outliers,
                 Vec total) {
  const Ints middle = every(p.middle());
  Vec scale{}, zero{};
  int64_t end = 0;  // of the columns that share them
  for (const Outlier& outlier : outliers) {
    if (outlier.place >= end) {
      const int64_t group = outlier.place / p.group;
      end = (group + 1) * p.group;
      scale = scales_at(p, t.panel, group, first);
      if (p.zeros) zero = load_stored(zeros_at(p, t.panel, group, first), kRows);
    }
    const Ints four = load_four<kOf>(t.codes + 4 * first, outlier.place);
    const Ints code = (four >> static_cast<int32_t>(outlier.place % 4 * 8)) & 255;
    const Vec number = __builtin_convertvector(code - middle, Vec) - zero;
    total = add_product(total, number * scale, splat(outlier.x));
  }
  return total;
}

// Writes kHigh rows of a panel's outputs [first, first + kRows): totals, what rows leave as it is, and
// the bias.
template <int kOf, int kHigh>
inline void finish(const Packed& p, const Rounded& in, const Tile& t, int first, Vec* totals) {
  if (p.rounding == kOutliers)
    for (int i = 0; i < kHigh; ++i)
      totals[i] = add_outliers<kOf>(p, t, first, in.outliers[t.row + i], totals[i]);
  const int64_t output = t.panel * kPanel + first;
  const int64_t width = std::min<int64_t>(kRows, p.outputs - output);
  if (width <= 0) return;
  const Vec bias = p.bias ? load_stored(p.bias + output, width) : Vec{};
  float* out = p.out + (in.first + t.row) * p.out_stride + output;
  for (int i = 0; i < kHigh; ++i) store_raw(totals[i] + bias, out + i * p.out_stride, width);
}

// kHigh rows and the outputs [first, first + kRows) of a panel, or of two.
template <int kOf, int kPlanes, int kHigh, int kWide>
void tile(const Packed& p, const Rounded& in, const Tile& t, int first) {
  constexpr int kBytes = kStep * kPanel * bits_of(kOf) / 8;  // of a step of a panel
  Vec totals[kWide][kHigh] = {};
  const uint8_t* codes = t.codes + 4 * first;
  const int8_t* bytes = in.bytes.data() + t.row * in.places * kPlanes;
  const float* scales = in.scales.data() + t.row * in.runs;
  const int32_t* sums = in.sums.data() + t.row * in.runs;
  const int32_t* raised = in.raised.data() + t.row * in.runs;
  const float* taken = in.taken.data() + t.row * in.runs;
  for (int64_t r = 0, group = 0; r < in.runs; ++r) {
    const int64_t at = r * in.run, steps = std::min(in.run, in.places - at) / kStep;
    if (at >= (group + 1) * p.group) ++group;  // a division would take as long as a step
    Run<kPlanes, kHigh, kWide> run(raised + r, in.runs);
    for (int64_t s = 0; s < steps; ++s) {
      Ints step[kWide][kDots];
#pragma GCC unroll 2
      for (int w = 0; w < kWide; ++w) {
        // Bytes go into the second-level cache (8 rows 1.0 ms in place of 1.3), half of them do not.
#pragma GCC unroll 4
        for (int line = 0; line < kBytes && kWide == 1; line += 64)
          __builtin_prefetch(codes + line + kAhead, 0, kOf == 8 ? 2 : 3);
        load_step<kOf>(codes + w * t.next, step[w]);
      }
      run.add(step, bytes);
      codes += kBytes;
      bytes += 4 * kDots * kHigh * kPlanes;
    }
#pragma GCC unroll 2
    for (int w = 0; w < kWide; ++w) {
      const float* made = t.scales + (2 * w * p.groups + group) * kPanel + first;
      const Vec scale =
          t.scales ? load_raw<Vec>(made, kRows) : scales_at(p, t.panel + w, group, first);
      Ints zero{};
      if (p.zeros)
        zero = ints_of(load_raw<Bytes>(zeros_at(p, t.panel + w, group, first), kRows));
#pragma GCC unroll 8
      for (int i = 0; i < kHigh; ++i) {
        Ints whole = run.of(w, i);
        if (p.zeros) whole -= zero * every(sums[i * in.runs + r]);
        totals[w][i] = add_product(totals[w][i], __builtin_convertvector(whole, Vec),
                                   scale * splat(scales[i * in.runs + r]));
      }
      if (!p.minima) continue;
      const Vec minimum = t.scales ? load_raw<Vec>(made + p.groups * kPanel, kRows)
                                   : minima_at(p, t.panel + w, group, first);
#pragma GCC unroll 8
      for (int i = 0; i < kHigh; ++i)
        totals[w][i] = add_product(totals[w][i], minimum, splat(taken[i * in.runs + r]));
    }
  }
#pragma GCC unroll 2
  for (int w = 0; w < kWide; ++w)
    finish<kOf, kHigh>(p, in, {t.codes + w * t.next, t.panel + w, t.row}, first, totals[w]);
}

// The same of one row or two and of runs of kSteps steps, one or two, which are groups: a plane is
// one chain, as other runs' sums do not wait for it, and sums that are not apart need not be added.
// Scales are made for kSoon runs at a time: of all they would come late from memory. One row, 2048 x
// 2048: E2M1 codes in 80 us in place of 92, int4 in groups of 32 in 72 in place of 82.
template <int kOf, int kPlanes, int kHigh, int kSteps>
void short_runs(const Packed& p, const Rounded& in, const Tile& t, int first) {
  constexpr int kBytes = kStep * kPanel * bits_of(kOf) / 8, kSoon = 16;
  float scales[kSoon * kRows], minima[kSoon * kRows];
  Vec totals[kHigh] = {};
  const uint8_t* codes = t.codes + 4 * first;
  const int8_t* bytes = in.bytes.data() + t.row * in.places * kPlanes;
  const int8_t* zeros = p.zeros ? zeros_at(p, t.panel, 0, first) : nullptr;
  for (int64_t from = 0; from < in.runs; from += kSoon) {
    const int64_t end = std::min(in.runs, from + kSoon);
    const GroupSpan soon{t.panel, from, end, first};
    read_groups<kRows>(scales_of(p), soon, scales);
    if (p.minima) read_groups<kRows>(minima_of(p), soon, minima);
    for (int64_t r = from; r < end; ++r) {
      Ints sums[kHigh][kPlanes] = {};
      for (int i = 0; i < kHigh; ++i)
        sums[i][kPlanes - 1] = every(in.raised[(t.row + i) * in.runs + r]);
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 4
        for (int line = 0; line < kBytes; line += 64)
          __builtin_prefetch(codes + line + kAhead, 0, kOf == 8 ? 2 : 3);
        Ints step[kDots];
        load_step<kOf>(codes, step);
#pragma GCC unroll 4
        for (int q = 0; q < kDots; ++q)
#pragma GCC unroll 4
          for (int i = 0; i < kHigh * kPlanes; ++i) {
            int32_t four;
            std::memcpy(&four, bytes + 4 * (q * kHigh * kPlanes + i), 4);
            Ints& sum = sums[i / kPlanes][i % kPlanes];
            sum = dot(sum, step[q], every(four));
          }
        codes += kBytes;
        bytes += 4 * kDots * kHigh * kPlanes;
      }
      const Vec scale = load_raw<Vec>(scales + (r - from) * kRows, kRows);
      for (int i = 0; i < kHigh; ++i) {
        const int64_t at = (t.row + i) * in.runs + r;
        Ints whole = sums[i][kPlanes - 1];
        if (kPlanes == 2) whole += sums[i][0] << 8;
        if (zeros)
          whole -= ints_of(load_raw<Bytes>(zeros + r * kPanel, kRows)) * every(in.sums[at]);
        totals[i] = add_product(totals[i], __builtin_convertvector(whole, Vec),
                                scale * splat(in.scales[at]));
        if (p.minima)
          totals[i] = add_product(totals[i], load_raw<Vec>(minima + (r - from) * kRows, kRows),
                                  splat(in.taken[at]));
      }
    }
  }
  finish<kOf, kHigh>(p, in, t, first, totals);
}

// All outputs of a panel, as many at once as a register has lanes. Where scales are made already, a
// tile reads these.
template <int kOf, int kPlanes, int kHigh, int kWide>
void whole(const Packed& p, const Rounded& in, const Tile& t) {
  for (int part = 0; part < kParts; ++part) {
    const int first = part * kRows;
    if constexpr (kWide == 1 && kHigh <= 2) {
      const int64_t steps = t.scales || in.places % in.run ? 0 : in.run / kStep;
      if (steps == 1) {
        short_runs<kOf, kPlanes, kHigh, 1>(p, in, t, first);
        continue;
      }
      if (steps == 2) {
        short_runs<kOf, kPlanes, kHigh, 2>(p, in, t, first);
        continue;
      }
    }
    tile<kOf, kPlanes, kHigh, kWide>(p, in, t, first);
  }
}

template <int kOf, int kPlanes, int kWide, int kMost>
void rows(const Packed& p, const Rounded& in, Tile t) {
  for (t.row = 0; t.row < in.count;) {
    const int high = height<kMost>(in.count - t.row);
    if constexpr (kMost == 8) if (high == 8) whole<kOf, kPlanes, 8, kWide>(p, in, t);
    if (high == 4) whole<kOf, kPlanes, 4, kWide>(p, in, t);
    if (high == 2) whole<kOf, kPlanes, 2, kWide>(p, in, t);
    if (high == 1) whole<kOf, kPlanes, 1, kWide>(p, in, t);
    t.row += high;
  }
}

// Codes of 2 or 4 bits of a panel to bytes.
template <int kOf>
void unpack(const uint8_t* codes, int64_t bytes, uint8_t* to) {
  constexpr int kBytes = kStep * kPanel * bits_of(kOf) / 8;
  for (int64_t at = 0; at < bytes; at += kBytes, to += kStep * kPanel)
    for (int part = 0; part < kParts; ++part) {
      __builtin_prefetch(codes + at + part * kBytes / kParts + kAhead / 4);
      Ints step[kDots];
      load_step<kOf>(codes + at + 4 * kRows * part, step);
      for (int q = 0; q < kDots; ++q)
        std::memcpy(to + 4 * (q * kPanel + kRows * part), &step[q], sizeof step[q]);
    }
}

// Panels [from, to), of few rows.
template <int kOf, int kPlanes>
void few_rows(const Packed& p, const Rounded& in, int64_t from, int64_t to) {
  const bool made = in.count > kHighest;
  std::vector<float> scales(made ? 2 * p.groups * kPanel : 0);
  for (int64_t panel = from; panel < to; ++panel) {
    const Tile t{p.codes + panel * p.panel_bytes, panel, 0, 0, made ? scales.data() : nullptr};
    if (made) read_panel(p, panel, scales.data());
    rows<kOf, kPlanes, 1, kHighest>(p, in, t);
  }
}

// Panels [from, to), of many rows: two at a time where registers hold the sums of both, so that what
// is read of a row is multiplied twice (64 rows of 4 bits in 3.3 ms in place of 4.0, of two planes in
// 5.1 in place of 6.2). Of few rows two streams are slower than one. Half bytes and quarters are
// unpacked once for all rows.
template <int kOf, int kPlanes>
void many_rows(const Packed& p, const Rounded& in, int64_t from, int64_t to) {
  constexpr bool kPacked = kOf != 8;
  const int64_t each = kPacked ? kPanel * in.places : p.panel_bytes, numbers = p.groups * kPanel;
  std::vector<uint8_t> bytes(kPacked ? kPair * each : 0);
  std::vector<float> scales(kPair * 2 * numbers);
  for (int64_t panel = from; panel < to; panel += kPair) {
    const uint8_t* codes = p.codes + panel * p.panel_bytes;
    const int64_t count = std::min<int64_t>(kPair, to - panel);
    for (int64_t i = 0; i < count; ++i) {
      read_panel(p, panel + i, scales.data() + i * 2 * numbers);
      if (kPacked) unpack<kOf>(codes + i * p.panel_bytes, p.panel_bytes, bytes.data() + i * each);
    }
    const Tile t{kPacked ? bytes.data() : codes, panel, 0, each, scales.data()};
    if (count == kPair) rows<8, kPlanes, kPair, tallest(kPlanes)>(p, in, t);
    else rows<8, kPlanes, 1, tallest(kPlanes)>(p, in, t);
  }
}

template <int kOf, int kPlanes>
void panels(const Packed& p, const Rounded& in, int64_t from, int64_t to) {
  if (in.many()) many_rows<kOf, kPlanes>(p, in, from, to);
  else few_rows<kOf, kPlanes>(p, in, from, to);
}

template <int kPlanes>
void panels_of(const Packed& p, const Rounded& in, int64_t from, int64_t to) {
  if (p.codes_are == kE2M1) panels<kTwice, kPlanes>(p, in, from, to);
  else if (p.codes_are == kIQ4) panels<kNear, kPlanes>(p, in, from, to);
  else if (p.bits == 2) panels<2, kPlanes>(p, in, from, to);
  else if (p.bits == 4) panels<4, kPlanes>(p, in, from, to);
  else panels<8, kPlanes>(p, in, from, to);
}

}  // namespace

extern "C" void packed_dots(const Packed* p) {
  static thread_local Rounded in;
  // A group of all columns need not end with a step.
  const bool row = p->group >= p->inputs;
  in.places = (p->inputs + kStep - 1) / kStep * kStep;
  in.run = row ? in.places : p->group;
  if (p->rounding == kRuns) in.run = row ? kRun : std::min(kRun, p->group);
  in.runs = (in.places + in.run - 1) / in.run;
  const int64_t most = kKept / (in.places * p->planes) / 8 * 8;
  const int64_t strip = std::max(2 * kFew, most);
  for (in.first = 0; in.first < p->rows; in.first += strip) {
    in.count = std::min(strip, p->rows - in.first);
    round_rows(*p, in);
    const Rounded& rounded = in;
    const int64_t products = in.count * in.places * kPanel * p->planes / 4;  // four a lane
    const int64_t grain = worth_a_thread(products, p->panel_bytes);
    in_parallel(p->threads, p->panels(), grain, [&](int64_t from, int64_t to) {
      p->planes == 2 ? panels_of<2>(*p, rounded, from, to)
                     : panels_of<1>(*p, rounded, from, to);
    });
  }
}
