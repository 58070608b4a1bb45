// E4M3 codes of a weight that is rounded to bf16: a table of 128 magnitudes a scale, in which a
// permutation of words looks 32 up at once. Computed one by one, they took twice as long.

#pragma once

#include "direct.h"

#ifdef __AVX512BW__
struct Magnitudes {
  __m512i words[4];

  void read(float scale) {
    const Ints places{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    BFloat16 found[128];
    for (int i = 0; i < 8; ++i)
      store_exact(plain<kBFloat16>(e4m3(places + 16 * i) * scale), found + 16 * i, kRows);
    std::memcpy(words, found, sizeof words);
  }

  // Of words from 0 to 255 the numbers.
  __m512i of(__m512i codes) const {
    const __m512i low = _mm512_permutex2var_epi16(words[0], codes, words[1]);
    const __m512i high = _mm512_permutex2var_epi16(words[2], codes, words[3]);
    const __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(-32768));
    return _mm512_xor_si512(_mm512_mask_blend_epi16(upper, low, high), sign);
  }

  // Of an output's chunk: in the lower halves of lanes steps 0 and 1, in the upper 2 and 3.
  void of_chunk(const uint8_t* line, __m512i* even, __m512i* odd) const {
    const __m512i codes = _mm512_loadu_si512(line);
    *even = of(_mm512_and_si512(codes, _mm512_set1_epi16(255)));
    *odd = of(_mm512_srli_epi16(codes, 8));
  }

  // Of each step of a chunk 16 numbers.
  void at(const uint8_t* line, Vec* to) const {
    __m512i even, odd;
    of_chunk(line, &even, &odd);
    const __m512i upper = _mm512_set1_epi32(-65536);
    to[0] = (Vec)_mm512_slli_epi32(even, 16);
    to[1] = (Vec)_mm512_slli_epi32(odd, 16);
    to[2] = (Vec)_mm512_and_si512(even, upper);
    to[3] = (Vec)_mm512_and_si512(odd, upper);
  }

  void store(const uint8_t* line, BFloat16* to) const {
    __m512i even, odd;
    of_chunk(line, &even, &odd);
    const __m512i steps[4] = {even, odd, _mm512_srli_epi32(even, 16), _mm512_srli_epi32(odd, 16)};
    for (int j = 0; j < 4; ++j)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kStep * j),
                          _mm512_cvtepi32_epi16(steps[j]));
  }
};

constexpr int64_t kChunk = 64;  // columns

// Whether scales are for whole chunks, and for enough of them that tables are worth it.
inline bool has_magnitudes(const Packed& p) {
  const bool whole = p.group % kChunk == 0 || p.group >= p.inputs;
  const bool long_ = p.shared || p.group >= 4 * kChunk || p.group >= p.inputs;
  return p.codes_are == kE4M3 && p.plain_kind == kBFloat16 && whole && long_;
}

// Tables of outputs of a panel, made when a group begins.
struct PanelMagnitudes {
  int64_t group = -1;
  Magnitudes of[kPanel];

  void read(const Packed& p, int64_t panel, int64_t column, int first, int width) {
    if (column / p.group == group) return;
    group = column / p.group;
    Grid grid;
    grid.read(p, panel, group);
    if (p.shared) of[0].read(grid.scale[0]);
    else for (int r = first; r < first + width; ++r) of[r].read(grid.scale[r]);
  }

  const Magnitudes& at(const Packed& p, int output) const { return of[p.shared ? 0 : output]; }
};

// kHigh rows, 1 or 2, and kRows / kHigh outputs of a panel.
template <int kHigh>
void magnitudes_tile(const Packed& p, const float* x, int64_t row, int64_t panel, int first) {
  constexpr int kWidth = kRows / kHigh;
  Vec sums[kRows] = {};
  PanelMagnitudes tables;
  const uint8_t* codes = p.codes + panel * p.panel_bytes + first * kLine;
  for (int64_t k = 0; k < p.inputs; k += kChunk, codes += kPanel * kLine) {
    const int steps = std::min<int64_t>(4, (p.inputs - k + kStep - 1) / kStep);
    tables.read(p, panel, k, first, kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; ++r) {
      Vec b[4];
      __builtin_prefetch(codes + r * kLine + kAhead);
      tables.at(p, first + r).at(codes + r * kLine, b);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < kHigh && j < steps; ++i) {
          Vec& sum = sums[i * kWidth + r];
          sum = fused(load_once(x + (k + kStep * j) * kHigh + kStep * i), b[j], sum);
        }
    }
  }
  finish<kHigh>(p, sums, row, panel * kPanel + first);
}

// Panels [from, to), two rows or one.
inline void magnitudes(const Packed& p, Near& near, int64_t from, int64_t to) {
  for (int64_t panel = from; panel < to; ++panel)
    for (int64_t row = 0; row < p.rows;) {
      if (p.rows - row == 1) magnitudes_tile<1>(p, near.at(row), row, panel, 0);
      else
        for (int first = 0; first < kPanel; first += kRows / 2)
          magnitudes_tile<2>(p, near.at(row), row, panel, first);
      row += 2;
    }
}

// Numbers of a panel, [16 outputs, inputs].
inline void store_panel(const Packed& p, int64_t panel, BFloat16* to) {
  PanelMagnitudes tables;
  const uint8_t* codes = p.codes + panel * p.panel_bytes;
  for (int64_t k = 0; k < p.inputs; k += kChunk, codes += kPanel * kLine) {
    tables.read(p, panel, k, 0, kPanel);
    const int64_t left = std::min(kChunk, p.inputs - k);
    for (int r = 0; r < kPanel; ++r) {
      BFloat16* row = to + r * p.inputs + k;
      BFloat16 last[kChunk];
      tables.at(p, r).store(codes + r * kLine, left == kChunk ? row : last);
      if (left < kChunk) std::copy_n(last, left, row);
    }
  }
}
#endif
