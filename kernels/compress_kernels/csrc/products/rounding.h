// Rows rounded to whole numbers, as tiles of products with codes read them.
//
// By the math inputs are rounded to 8 or 16 bits, a row and run of columns together: to 127, or to
// 32512 in two planes of bytes (256 * high + low). A scheme that rounds inputs itself rounds a whole
// row to 8 bits, to the codes of compress.quant.activations.

#pragma once

#include <cstring>
#include <vector>

#include "panels.h"
#include "row_tiles.h"

constexpr int64_t kRun = 128;              // columns that the math rounds together, at most
constexpr float kLeast = 1e-30f;           // inputs that are smaller are 0
constexpr int64_t kFew = 16;               // rows, up to which codes are unpacked for each tile
constexpr int kHighest = 8;                // rows of a tile

// The same of many rows: with two panels the sums of 8 rows in one plane fill half of the registers.
constexpr int tallest(int planes) { return kRows == 16 ? kHighest / planes : kHighest; }

// A number that is left as it is.
struct Outlier { int64_t place; float x; };
typedef std::vector<Outlier> Outliers;

// Those of a tile lie together, [4 columns][row][plane] of 4 bytes.
struct Rounded {
  int64_t run;                   // columns of a sum
  int64_t places, runs;          // columns with the padding; runs of a row
  int64_t first, count;          // rows
  std::vector<int8_t> bytes;     // [rows, planes * places]
  std::vector<float> scales;     // [rows, runs]
  std::vector<int32_t> sums;     // [rows, runs], of the whole numbers
  std::vector<int32_t> raised;   // the same, times what codes are raised by, negated
  std::vector<float> taken;      // what the sums are worth, less than 0
  std::vector<Outliers> outliers;   // of each row, where any are looked for

  bool many() const { return count > kFew; }
};


// How numbers of a row become whole ones: times `factor` or, where it is 0, divided by `worth`.
struct Grain {
  float factor, worth, low, high;

  bool none() const { return !(worth < __builtin_inff()); }  // nothing finite comes of the row

  // Whole numbers are below 2^22: 1.5 * 2^23 added leaves them in the lowest bits, ties to even.
  Ints of(Vec x) const {
    Vec scaled = factor > 0 ? x * factor : x / worth;
    scaled = scaled < splat(low) ? splat(low) : scaled;
    scaled = scaled > splat(high) ? splat(high) : scaled;
    return (Ints)words(scaled + 12582912.0f) - 0x4b400000;
  }
};

// What lanes add up to, and the highest of them. One by one they took longer than the rest of a row
// that is rounded in groups of 16.
inline int32_t sum_of(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int i = 0; i < kRows; ++i) sum += x[i];
  return sum;
#endif
}

inline int32_t highest_of(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t top = x[0];
  for (int i = 1; i < kRows; ++i) top = std::max(top, x[i]);
  return top;
#endif
}

// The largest magnitude of whole vectors, infinite or NaN where one is.
inline float largest_of_run(const float* x, int64_t count) {
  Ints top{};
  for (int64_t i = 0; i < count; i += kRows) {
    const Ints size = (Ints)(words(load_raw<Vec>(x + i, kRows)) & 0x7fffffffu);
    top = size > top ? size : top;
  }
  const int32_t bits = highest_of(top);
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// The lowest bytes of lanes.
inline void store_bytes(Ints whole, int8_t* to) {
#ifdef __AVX512F__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)whole));
#else
  for (int i = 0; i < kRows; ++i) to[i] = static_cast<int8_t>(whole[i]);
#endif
}

// Bytes of kRows columns, planes one after the other, to where a tile reads them: four of a row's
// columns after `apart` bytes.
inline void place(Ints whole, int planes, int64_t apart, int8_t* to) {
#ifdef __AVX512F__
  if (planes == 2) {
    const __m128i upper = _mm512_cvtepi32_epi8((__m512i)((whole + 128) >> 8));
    const __m128i lower = _mm512_cvtepi32_epi8((__m512i)whole);
    const __m128i first = _mm_unpacklo_epi32(upper, lower);
    const __m128i last = _mm_unpackhi_epi32(upper, lower);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), first);
    _mm_storeh_pd(reinterpret_cast<double*>(to + apart), (__m128d)first);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * apart), last);
    _mm_storeh_pd(reinterpret_cast<double*>(to + 3 * apart), (__m128d)last);
    return;
  }
#endif
  int8_t upper[kRows], lower[kRows];
  store_bytes(planes == 2 ? (whole + 128) >> 8 : whole, upper);
  if (planes == 2) store_bytes(whole, lower);
#pragma GCC unroll 4
  for (int c = 0; c < kRows; c += 4, to += apart) {
    std::memcpy(to, upper + c, 4);
    if (planes == 2) std::memcpy(to + 4, lower + c, 4);
  }
}

// The math's: of a run, NaN where a number of it is not finite, all 0 where it is nearly 0.
inline Grain grain_of_run(const Packed& p, const float* x, int64_t count) {
  const float top = largest_of_run(x, count), most = p.planes == 2 ? 32512.0f : 127.0f;
  if (!(top < __builtin_inff())) return {1.0f, __builtin_nanf(""), 0, 0};
  if (top < kLeast) return {1.0f, 0.0f, 0, 0};
  return {most / top, top / most, -most, most};
}

inline bool any(Integers lanes) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < kRows; ++i) all |= lanes[i];
  return all != 0;
#endif
}

// A scheme's, of a row. Outliers are 0 in x afterwards.
inline Grain grain_of_row(const Packed& p, float* x, int64_t count, Outliers* outliers) {
  const float low = -(p.largest + 0.5f), high = p.largest - 0.5f;
  if (p.rounding == kFixed) {
    bool number = true;
    for (int64_t i = 0; i < count; ++i) number &= x[i] == x[i];
    return {0, number ? p.fixed : __builtin_nanf(""), low, high};
  }
  if (p.rounding == kOutliers) {
    outliers->clear();
    for (int64_t i = 0; i < count; i += kRows) {
      const Vec own = load_raw<Vec>(x + i, count - i);
      const Vec seen = nearest_of(own, static_cast<const Float16*>(nullptr));
      const Integers out = floats(words(seen) & 0x7fffffffu) >= splat(p.threshold);
      store_raw(out ? Vec{} : seen, x + i, count - i);
      if (!any(out)) continue;
      for (int64_t j = 0; j < std::min<int64_t>(kRows, count - i); ++j)
        if (out[j]) outliers->push_back({i + j, own[j]});
    }
  }
  const float top = largest_of(x, count);
  if (!(top < __builtin_inff())) return {1.0f, __builtin_nanf(""), 0, 0};
  if (p.rounding == kToken) {
    const float worth = top / p.largest;
    return {0, worth == 0 ? 1.1920928955078125e-07f : worth, low, high};
  }
  const float most = top == 0 ? 1.0f : top;
  const float inverse = 1.0f / most;  // as torch divides a number by a tensor
  return {inverse * p.largest, most / p.largest, -p.largest, p.largest};
}

// One row, in place `index` of a tile of `high` rows that begins at `bytes`.
inline void round_row(const Packed& p, float* x, Rounded& into, int64_t row, int index, int high,
                      int8_t* bytes) {
  const int64_t apart = 4 * static_cast<int64_t>(high) * p.planes;
  Grain grain{};
  Outliers* outliers = p.rounding == kOutliers ? &into.outliers[row] : nullptr;
  if (p.rounding != kRuns) grain = grain_of_row(p, x, into.places, outliers);
  for (int64_t r = 0; r < into.runs; ++r) {
    const int64_t begin = r * into.run, end = std::min(begin + into.run, into.places);
    if (p.rounding == kRuns) grain = grain_of_run(p, x + begin, end - begin);
    const bool zeros = grain.none() || grain.worth == 0;
    Ints sums{};
    for (int64_t at = begin; at < end; at += kRows) {  // runs are whole steps
      const Ints whole = zeros ? Ints{} : grain.of(load_raw<Vec>(x + at, kRows));
      sums += whole;
      place(whole, p.planes, apart, bytes + 4 * (at / 4 * high + index) * p.planes);
    }
    const int32_t sum = sum_of(sums);
    into.scales[row * into.runs + r] = grain.worth;
    into.sums[row * into.runs + r] = sum;
    into.raised[row * into.runs + r] = -p.middle() * sum;
    into.taken[row * into.runs + r] = -(static_cast<float>(sum) * grain.worth);
  }
}

// Columns beyond the last are 0.
inline void round_rows(const Packed& p, Rounded& into) {
  const int64_t width = into.places * p.planes, count = into.count;
  into.bytes.resize(count * width);
  into.scales.resize(count * into.runs);
  into.sums.resize(count * into.runs);
  into.raised.resize(count * into.runs);
  into.taken.resize(count * into.runs);
  if (p.rounding == kOutliers) into.outliers.resize(count);
  const auto each = [&](float* x, int64_t row, int index, int high) {
    round_row(p, x, into, row, index, high, into.bytes.data() + (row - index) * width);
  };
  const bool low = into.many() && tallest(p.planes) < kHighest;
  if (low) in_row_tiles<tallest(2)>(p, into.first, count, into.places, each);
  else in_row_tiles<kHighest>(p, into.first, count, into.places, each);
}
