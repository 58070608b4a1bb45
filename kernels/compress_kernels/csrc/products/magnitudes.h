// E4M3 codes of a weight that is rounded to bf16: eight significands of a scale and eight numbers
// below the least exponent, of which a permutation of words looks 32 up at once; exponents are
// added. Computed one by one, numbers took three times as long.

#pragma once

#include "direct.h"

#ifdef __AVX512BW__
constexpr int64_t kChunk = 64;  // columns

// Of an output's line the numbers of step j, computed one by one.
inline Vec number_of(const uint8_t* line, int j, float scale) {
  Ints codes;
  std::memcpy(&codes, line, sizeof codes);
  return plain<kBFloat16>(e4m3((codes >> (8 * j)) & 255) * scale);
}

// Numbers of an output's chunk, in bf16: those of steps 0 and 2 in the lower and upper halves of
// lanes, and those of steps 1 and 3. They become fp32 where they are multiplied: eight vectors more
// would not stay in registers.
struct Line {
  __m512i even, odd;

  Vec at(int j) const {
    const __m512i& from = j % 2 ? odd : even;
    if (j < 2) return (Vec)_mm512_slli_epi32(from, 16);
    return (Vec)_mm512_and_si512(from, _mm512_set1_epi32(-65536));
  }
};

struct Magnitudes {
  __m512i usual;  // significands, in the exponent before that of code 8, eight words repeated
  __m512i small;  // codes 0 to 7

  // Whether products of scales stay in the exponents that bf16 has, so that twice a number is
  // rounded to twice what it is rounded to.
  static bool takes(Vec scales) {
    const __m512 sizes = _mm512_abs_ps((__m512)scales);
    const __mmask16 above = _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(0x1p-100f), _CMP_GT_OQ);
    return _mm512_mask_cmp_ps_mask(above, sizes, _mm512_set1_ps(0x1p100f), _CMP_LT_OQ) == 0xffff;
  }

  void read(float scale) {
    const Ints places{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec numbers = e4m3(places) * scale;
#ifdef __AVX512BF16__
    const __m256i all = (__m256i)_mm512_cvtneps_pbh((__m512)numbers);
#else
    __m256i all;
    const Halves found = __builtin_convertvector(words(plain<kBFloat16>(numbers)) >> 16, Halves);
    std::memcpy(&all, &found, sizeof all);
#endif
    small = _mm512_broadcast_i32x4(_mm256_castsi256_si128(all));
    usual = _mm512_sub_epi16(_mm512_broadcast_i32x4(_mm256_extracti128_si256(all, 1)),
                             _mm512_set1_epi16(1 << 7));
  }

  // The numbers of words' lower bytes, which are in the upper ones of `raised`, too.
  __m512i of(__m512i codes, __m512i raised) const {
    const __m512i exponents =  // with the sign before them
        _mm512_and_si512(_mm512_srai_epi16(raised, 4), _mm512_set1_epi16(-0x7880));
    const __mmask32 none = _mm512_testn_epi16_mask(exponents, _mm512_set1_epi16(0x0780));
    const __m512i above = _mm512_permutexvar_epi16(codes, usual);
    return _mm512_add_epi16(_mm512_mask_permutexvar_epi16(above, none, codes, small), exponents);
  }

  // The numbers of an output's chunk.
  Line at(const uint8_t* line) const {
    const __m512i codes = _mm512_loadu_si512(line);
    return {of(codes, _mm512_slli_epi16(codes, 8)), of(_mm512_srli_epi16(codes, 8), codes)};
  }
};

// Whether scales are for whole chunks of columns that lie in order.
inline bool has_magnitudes(const Packed& p) {
  const bool whole = p.group % kChunk == 0 || p.group >= p.inputs;
  return p.codes_are == kE4M3 && p.plain_kind == kBFloat16 && whole && !p.columns;
}

// Those of a panel's group.
struct PanelMagnitudes {
  float scales[kPanel];
  Magnitudes of[kPanel];
  bool all;  // whether numbers of the group come of tables

  // Of some outputs.
  void read(const Packed& p, int64_t panel, int64_t group, int first, int width) {
    Vec found = scales_at(p, panel, group, 0);
    const int64_t outputs = p.outputs - panel * kPanel;
    for (int r = outputs; r < kPanel; ++r) found[r] = 1.0f;  // they only fill up
    all = Magnitudes::takes(found);
    std::memcpy(scales, &found, sizeof found);
    for (int r = first; r < first + width; ++r) of[r].read(scales[r]);
  }
};

// The products of a chunk of columns, or of its first steps. x: of the chunk, as Near has it.
template <int kHigh, bool kWhole>
[[gnu::always_inline]] inline void add_chunk(const Magnitudes* tables, const uint8_t* codes,
                                             const float* x, int steps, Vec* sums) {
  constexpr int kWidth = kRows / kHigh;
  constexpr int kOnce = kHigh == 1 ? 1 : 2;  // outputs that a loaded number of x is for
  Vec row[4];                                // of one row, for all outputs
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
    if (kHigh == 1 && (kWhole || j < steps)) row[j] = load_once(x + kStep * j);
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; r += kOnce) {
    Line lines[kOnce];
#pragma GCC unroll 2
    for (int q = 0; q < kOnce; ++q) {
      __builtin_prefetch(codes + (r + q) * kLine + kAhead);
      lines[q] = tables[r + q].at(codes + (r + q) * kLine);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      if (!kWhole && j >= steps) break;
      Vec b[kOnce];
#pragma GCC unroll 2
      for (int q = 0; q < kOnce; ++q) b[q] = lines[q].at(j);
#pragma GCC unroll 8
      for (int i = 0; i < kHigh; ++i) {
        const Vec a = kHigh == 1 ? row[j] : load_once(x + kStep * (j * kHigh + i));
#pragma GCC unroll 2
        for (int q = 0; q < kOnce; ++q) {
          Vec& sum = sums[i * kWidth + r + q];
          sum = fused(a, b[q], sum);
        }
      }
    }
  }
}

// The same without tables.
template <int kHigh>
[[gnu::noinline]] void add_slowly(const float* scales, const uint8_t* codes, const float* x,
                                  int steps, Vec* sums) {
  constexpr int kWidth = kRows / kHigh;
  for (int r = 0; r < kWidth; ++r)
    for (int j = 0; j < steps; ++j) {
      const Vec b = number_of(codes + r * kLine, j, scales[r]);
      for (int i = 0; i < kHigh; ++i) {
        Vec& sum = sums[i * kWidth + r];
        sum = fused(load_once(x + kStep * (j * kHigh + i)), b, sum);
      }
    }
}

// kHigh rows and kRows / kHigh outputs of a panel, group by group.
template <int kHigh>
void magnitudes_tile(const Packed& p, const float* x, int64_t row, int64_t panel, int first,
                     PanelMagnitudes& tables) {
  constexpr int kWidth = kRows / kHigh;
  const uint8_t* codes = p.codes + panel * p.panel_bytes + first * kLine;
  Vec sums[kRows] = {};  // in registers: what is given away is a copy
  int64_t k = 0;
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t end = std::min((group + 1) * p.group, p.inputs);
    if (p.groups > 1) tables.read(p, panel, group, first, kWidth);
    if (!tables.all) {
      Vec slow[kRows];
      std::copy_n(sums, kRows, slow);
      for (; k < end; k += kChunk, codes += kPanel * kLine) {
        const int steps = (std::min(kChunk, end - k) + kStep - 1) / kStep;
        add_slowly<kHigh>(tables.scales + first, codes, x + k * kHigh, steps, slow);
      }
      std::copy_n(slow, kRows, sums);
      continue;
    }
    const Magnitudes* of = tables.of + first;
    for (; k + kChunk <= end; k += kChunk, codes += kPanel * kLine)
      add_chunk<kHigh, true>(of, codes, x + k * kHigh, 4, sums);
    if (k < end)
      add_chunk<kHigh, false>(of, codes, x + k * kHigh, (end - k + kStep - 1) / kStep, sums);
  }
  Vec done[kRows];
  std::copy_n(sums, kRows, done);
  finish<kHigh>(p, done, row, panel * kPanel + first);
}

template <int kHigh>
void magnitudes_panel(const Packed& p, const float* x, int64_t row, int64_t panel,
                      PanelMagnitudes& tables) {
  for (int first = 0; first < kPanel; first += kRows / kHigh)
    magnitudes_tile<kHigh>(p, x, row, panel, first, tables);
}

// Panels [from, to), a tile of rows after the other.
inline void magnitudes(const Packed& p, Near& near, int64_t from, int64_t to) {
  PanelMagnitudes tables;
  for (int64_t panel = from; panel < to; ++panel) {
    if (p.groups == 1) tables.read(p, panel, 0, 0, kPanel);
    for (int64_t row = 0; row < p.rows;) {
      const int high = height(p.rows - row);
      const float* x = near.at(row);
      if (high == 8) magnitudes_panel<8>(p, x, row, panel, tables);
      if (high == 4) magnitudes_panel<4>(p, x, row, panel, tables);
      if (high == 2) magnitudes_panel<2>(p, x, row, panel, tables);
      if (high == 1) magnitudes_panel<1>(p, x, row, panel, tables);
      row += high;
    }
  }
}

// Numbers of a panel, [16 outputs, inputs], in fp32: tiles of many rows would widen others again and
// again.
inline void store_panel(const Packed& p, int64_t panel, float* to) {
  PanelMagnitudes tables;
  const uint8_t* codes = p.codes + panel * p.panel_bytes;
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t from = group * p.group, end = std::min(from + p.group, p.inputs);
    tables.read(p, panel, group, 0, kPanel);
    for (int r = 0; r < kPanel; ++r) {
      const Magnitudes own = tables.of[r];
      const uint8_t* line = codes + r * kLine;
      for (int64_t k = from; k < end; k += kChunk, line += kPanel * kLine) {
        Vec found[4];
        const Line numbers = own.at(line);
        if (tables.all) for (int j = 0; j < 4; ++j) found[j] = numbers.at(j);
        else for (int j = 0; j < 4; ++j) found[j] = number_of(line, j, tables.scales[r]);
        float* row = to + r * p.inputs + k;
        if (end - k >= kChunk) std::memcpy(row, found, sizeof found);
        else std::memcpy(row, found, (end - k) * sizeof(float));
      }
    }
    codes += (end - from) / kChunk * kPanel * kLine;
  }
}
#endif
