// Rows, rounded to E4M3 numbers, times E4M3 codes: sums of codes a run of columns, one fma a run.
//
// What hardware with such products does. Products of codes are exact in bf16's dot (dots.h), which
// multiplies two at a time; a run is all columns that share a scale of the weight and one of the
// inputs. Of a run two sums go along the columns, one of columns 2, 0, 6, 4, ... and one of 3, 1, 7,
// 5, ..., and are added; so a row has the same bits beside any others and on every instruction set.

#include <cstring>
#include <vector>

#include "float_rounding.h"
#include "dots.h"

namespace {

constexpr int64_t kFew = 16;           // rows, up to which each tile takes codes apart
constexpr int64_t kKept = 512 << 10;   // bytes of rounded rows, for the second-level cache
constexpr int64_t kAhead = 4 << 10;    // bytes of codes

// Codes of four columns of kRows outputs as pairs of bf16: columns 0 and 2, and 1 and 3.
struct Fours { Words even, odd; };

#ifdef __AVX512BW__
// Of words whose upper bytes are codes, and whose lower bytes, in `low`, are the same.
inline Words numbers_of(__m512i raised, __m512i low) {
  // From sign and magnitude, 4 bits lower, to bf16: 120 in exponents; below 8 there are none.
  const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(
      0, 0x3b00 - 0x10, 0x3b80 - 0x20, 0x3bc0 - 0x30, 0x3c00 - 0x40, 0x3c20 - 0x50, 0x3c40 - 0x60,
      0x3c60 - 0x70));
  const __m512i shifted =
      _mm512_and_si512(_mm512_srai_epi16(raised, 4), _mm512_set1_epi16(-0x7810));
  const __mmask32 none = _mm512_testn_epi16_mask(shifted, _mm512_set1_epi16(0x0780));
  const __m512i more =
      _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(120 << 7), none, low, small);
  return (Words)_mm512_add_epi16(shifted, more);
}

inline Fours load_fours(const uint8_t* from) {
  const __m512i codes = _mm512_loadu_si512(from);
  return {numbers_of(_mm512_slli_epi16(codes, 8), codes),
          numbers_of(codes, _mm512_srli_epi16(codes, 8))};
}
#else
inline Fours load_fours(const uint8_t* from) {
  Ints codes;
  std::memcpy(&codes, from, sizeof codes);
  const auto upper = [&](int byte) { return words(e4m3((codes >> (8 * byte)) & 255)) & 0xffff0000u; };
  return {upper(0) >> 16 | upper(2), upper(1) >> 16 | upper(3)};
}
#endif

inline Fours load_fours(const uint32_t* from) {
  Fours fours;
  std::memcpy(&fours.even, from, sizeof fours.even);
  std::memcpy(&fours.odd, from + kRows, sizeof fours.odd);
  return fours;
}

// Bytes of four columns of 16 outputs: as codes, and taken apart.
template <typename T>
constexpr int64_t kFour = kPanel * (sizeof(T) == 1 ? 4 : 2);

// kHigh rows and the outputs [first, first + kRows) of a panel. codes: of the panel.
template <int kHigh, typename T>
void tile(const Packed& p, const RoundedFloats& in, const T* codes, int64_t panel, int64_t row,
          int first) {
  Vec totals[kHigh] = {};
  const uint32_t* x = in.pairs.data() + row * in.places / 2;
  const float* scales = in.scales.data() + row * in.runs;
  const T* from = codes + kFour<T> * first / kPanel;
  for (int64_t r = 0; r < in.runs; ++r) {
    const int64_t begin = r * in.run, fours = std::min(in.run, in.places - begin) / 4;
    Vec even[kHigh] = {}, odd[kHigh] = {};
    for (int64_t f = 0; f < fours; ++f, from += kFour<T>, x += 2 * kHigh) {
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead, 0, 2);
      const Fours w = load_fours(from);
#pragma GCC unroll 8
      for (int i = 0; i < kHigh; ++i) {
        even[i] = add_pairs(even[i], x[2 * i] - Words{}, w.even);
        odd[i] = add_pairs(odd[i], x[2 * i + 1] - Words{}, w.odd);
      }
    }
    const Vec scale = scales_at(p, panel, begin / p.group, first);
#pragma GCC unroll 8
    for (int i = 0; i < kHigh; ++i)
      totals[i] = add_product(totals[i], even[i] + odd[i], scale * splat(scales[i * in.runs + r]));
  }
  const int64_t output = panel * kPanel + first;
  const int64_t width = std::min<int64_t>(kRows, p.outputs - output);
  if (width <= 0) return;
  const Vec bias = p.bias ? load_stored(p.bias + output, width) : Vec{};
  float* out = p.out + (in.first + row) * p.out_stride + output;
  for (int i = 0; i < kHigh; ++i) store_raw(totals[i] + bias, out + i * p.out_stride, width);
}

template <int kHigh, typename T>
void whole(const Packed& p, const RoundedFloats& in, const T* codes, int64_t panel, int64_t row) {
  for (int first = 0; first < kPanel; first += kRows)
    tile<kHigh>(p, in, codes, panel, row, first);
}

template <typename T>
void rows(const Packed& p, const RoundedFloats& in, const T* codes, int64_t panel) {
  for (int64_t row = 0; row < in.count;) {
    const int high = height<kTall>(in.count - row);
    if constexpr (kTall == 8)
      if (high == 8) whole<8>(p, in, codes, panel, row);
    if (high == 4) whole<4>(p, in, codes, panel, row);
    if (high == 2) whole<2>(p, in, codes, panel, row);
    if (high == 1) whole<1>(p, in, codes, panel, row);
    row += high;
  }
}

// Codes of a panel, taken apart: [4 columns][kRows outputs at a time][2 pairs].
void unpack(const uint8_t* codes, int64_t bytes, uint32_t* to) {
  for (int64_t at = 0; at < bytes; at += 4 * kRows, to += 2 * kRows) {
    __builtin_prefetch(codes + at + kAhead, 0, 2);
    const Fours fours = load_fours(codes + at);
    std::memcpy(to, &fours.even, sizeof fours.even);
    std::memcpy(to + kRows, &fours.odd, sizeof fours.odd);
  }
}

// Panels [from, to): few rows read codes, many what was taken apart for all of them.
void panels(const Packed& p, const RoundedFloats& in, int64_t from, int64_t to) {
  static thread_local std::vector<uint32_t> room;
  const bool few = in.count <= kFew;
  if (!few) room.resize(kPanel * in.places / 2);
  for (int64_t panel = from; panel < to; ++panel) {
    const uint8_t* codes = p.codes + panel * p.panel_bytes;
    if (few) {
      rows(p, in, codes, panel);
      continue;
    }
    unpack(codes, p.panel_bytes, room.data());
    rows(p, in, const_cast<const uint32_t*>(room.data()), panel);
  }
}

}  // namespace

extern "C" void float_dots(const Packed* p) {
  static thread_local RoundedFloats in;
  in.places = (p->inputs + kStep - 1) / kStep * kStep;
  in.run = std::min(p->group, p->input_group);
  if (in.run >= p->inputs) in.run = in.places;  // it need not end with a step
  in.runs = (in.places + in.run - 1) / in.run;
  const int64_t most = kKept / (in.places * 2) / kTall * kTall;
  const int64_t strip = std::max(2 * kFew, most);
  for (in.first = 0; in.first < p->rows; in.first += strip) {
    in.count = std::min(strip, p->rows - in.first);
    round_float_rows(*p, in);
    const RoundedFloats& rounded = in;
    const int64_t products = in.count * in.places * kPanel / 2;  // two a lane
    const int64_t grain = worth_a_thread(products, p->panel_bytes);
    in_parallel(p->threads, p->panels(), grain,
                [&](int64_t from, int64_t to) { panels(*p, rounded, from, to); });
  }
}
