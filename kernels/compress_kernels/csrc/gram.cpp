// out += xᵀx for bf16 x with AVX512_BF16: products exact, sums in fp32, upper triangle only.
//
// Two neighbouring tokens of a column form one 32-bit pair, the operand of vdpbf16ps. Columns are
// packed in panels of 16, [panel][pair][16], so that one packed copy serves as both factors: a
// panel's vector as it is, or one of its pairs broadcast. A tile of 8 x 48 sums stays in registers
// for kPairs pairs. Every element of out is summed by one thread in token order.

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "parallel.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

constexpr int kPanel = 16;        // columns of a panel
constexpr int kHigh = 8;          // rows of a tile of sums
constexpr int kWide = 3;          // panels across a tile of sums
constexpr int64_t kPairs = 256;   // pairs a tile adds up before it goes to memory
constexpr int64_t kStrip = 12;    // panels of rows that stay in the second-level cache
constexpr int64_t kPacked = 2 << 20;  // bytes packed at once, unless one run of pairs is more

struct Shape {
  int64_t tokens, columns, panels;
};

// packed: [panels][pairs][16] for tokens [first, first + 2 * pairs); zero beyond the ends.
void pack(const uint16_t* x, const Shape& s, int64_t first, int64_t pairs, int64_t panel,
          uint32_t* packed) {
  const int64_t column = panel * kPanel;
  const int width = static_cast<int>(std::min<int64_t>(kPanel, s.columns - column));
  const __mmask16 mask = static_cast<__mmask16>((1u << width) - 1);
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t token = first + 2 * p;
    __m512i pair = _mm512_setzero_si512();
    if (token < s.tokens)
      pair = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + token * s.columns + column));
    if (token + 1 < s.tokens) {
      const __m256i odd = _mm256_maskz_loadu_epi16(mask, x + (token + 1) * s.columns + column);
      pair = _mm512_or_si512(pair, _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    }
    _mm512_storeu_si512(packed + p * kPanel, pair);
  }
}

// sums[8][48] of left's 8 columns against three panels.
void tile(const uint32_t* left, const uint32_t* right, int64_t panel_stride, int64_t pairs,
          float* sums) {
  __m512 acc[kHigh][kWide];
  for (auto& row : acc)
    for (__m512& a : row) a = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh b[kWide];
#pragma GCC unroll 3
    for (int w = 0; w < kWide; ++w)
      b[w] = (__m512bh)_mm512_loadu_si512(right + w * panel_stride + p * kPanel);
#pragma GCC unroll 8
    for (int h = 0; h < kHigh; ++h) {
      const __m512bh a = (__m512bh)_mm512_set1_epi32(static_cast<int>(left[p * kPanel + h]));
#pragma GCC unroll 3
      for (int w = 0; w < kWide; ++w) acc[h][w] = _mm512_dpbf16_ps(acc[h][w], a, b[w]);
    }
  }
  for (int h = 0; h < kHigh; ++h)
    for (int w = 0; w < kWide; ++w)
      _mm512_storeu_ps(sums + (h * kWide + w) * kPanel, acc[h][w]);
}

void add_tile(const float* sums, int64_t row, int64_t column, int64_t columns, float* out) {
  const int64_t high = std::min<int64_t>(kHigh, columns - row);
  const int64_t wide = std::min<int64_t>(kWide * kPanel, columns - column);
  for (int64_t h = 0; h < high; ++h)
    for (int64_t w = 0; w < wide; ++w)
      out[(row + h) * columns + column + w] += sums[h * kWide * kPanel + w];
}

// All tiles of rows [strip, strip + kStrip) panels and one triple of panels, on or above the
// diagonal, for one run of packed pairs.
void add_cell(const uint32_t* packed, int64_t stride, int64_t run, int64_t pairs, int64_t strip,
              int64_t triple, const Shape& s, float* out) {
  alignas(64) float sums[kHigh * kWide * kPanel];
  const uint32_t* right = packed + triple * stride + run * kPanel;
  const int64_t last = std::min({strip + kStrip, triple + kWide, s.panels});
  for (int64_t panel = strip; panel < last; ++panel)
    for (int half = 0; half < kPanel; half += kHigh) {
      const int64_t row = panel * kPanel + half;
      if (row >= s.columns) continue;
      tile(packed + panel * stride + run * kPanel + half, right, stride, pairs, sums);
      add_tile(sums, row, triple * kPanel, s.columns, out);
    }
}

struct Cell {
  int64_t strip, triple;
};

std::vector<Cell> cells(const Shape& s) {
  std::vector<Cell> all;
  for (int64_t strip = 0; strip < s.panels; strip += kStrip)
    for (int64_t triple = strip; triple < s.panels; triple += kWide) all.push_back({strip, triple});
  return all;
}

void add_chunk(const uint32_t* packed, int64_t pairs, const Shape& s, int threads, float* out) {
  const std::vector<Cell> all = cells(s);
  in_parallel(threads, all.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t run = 0; run < pairs; run += kPairs)
      for (int64_t i = first; i < last; ++i)
        add_cell(packed, pairs * kPanel, run, std::min(kPairs, pairs - run), all[i].strip,
                 all[i].triple, s, out);
  });
}

void mirror(int64_t columns, int threads, float* out) {
  constexpr int64_t kSide = 32;
  in_parallel(threads, (columns + kSide - 1) / kSide, 1, [&](int64_t first, int64_t last) {
    for (int64_t band = first; band < last; ++band) {
      const int64_t low = band * kSide, high = std::min(columns, low + kSide);
      for (int64_t left = 0; left <= low; left += kSide)
        for (int64_t i = low; i < high; ++i)
          for (int64_t j = left; j < std::min(i, left + kSide); ++j)
            out[i * columns + j] = out[j * columns + i];
    }
  });
}

}  // namespace

extern "C" int gram_bf16_supported() { return 1; }

// x: bf16 [tokens, columns], out: fp32 [columns, columns], symmetric. Returns 0, or 1 without memory.
extern "C" int gram_bf16(const uint16_t* x, int64_t tokens, int64_t columns, int32_t threads,
                         float* out) {
  const Shape s{tokens, columns, (columns + kPanel - 1) / kPanel};
  // Panels beyond the last stay zero: the last triple may reach over the edge.
  const int64_t padded = s.panels + kWide;
  const int64_t fitting = kPacked / (padded * kPanel * 4) / kPairs * kPairs;
  const int64_t step = std::min(std::max(kPairs, fitting), (tokens + 1) / 2);
  std::unique_ptr<uint32_t[]> packed(new (std::nothrow) uint32_t[padded * step * kPanel]);
  if (!packed) return 1;
  for (int64_t first = 0; first < tokens; first += 2 * step) {
    const int64_t pairs = std::min(step, (tokens - first + 1) / 2);
    in_parallel(threads, s.panels, 4, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel)
        pack(x, s, first, pairs, panel, packed.get() + panel * pairs * kPanel);
    });
    std::fill_n(packed.get() + s.panels * pairs * kPanel, kWide * pairs * kPanel, 0u);
    add_chunk(packed.get(), pairs, s, threads, out);
  }
  mirror(columns, threads, out);
  return 0;
}

#else

extern "C" int gram_bf16_supported() { return 0; }
extern "C" int gram_bf16(const uint16_t*, int64_t, int64_t, int32_t, float*) { return 2; }

#endif
