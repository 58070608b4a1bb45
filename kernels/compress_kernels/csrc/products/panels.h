// Codes of a weight in panels of 16 outputs, as compress_kernels/panels.py lays them out.

#pragma once

#include <algorithm>
#include <cstdint>

#include "dots.h"
#include "stored.h"

constexpr int kPanel = 16;
constexpr int kStep = 16;             // columns that are gone through at once
constexpr int kParts = kPanel / kRows;  // vectors that hold a number for each output of a panel

// What codes are, and how rows are rounded. Mirrored in cpu/packed.py.
enum Codes { kWhole = 0, kE2M1 = 1, kE4M3 = 2, kUnsigned = 3, kIQ4 = 4 };
enum Rounding {
  kRuns = 0, kToken = 1, kFixed = 2, kAbsmax = 3, kOutliers = 4, kFloats = 5, kFixedFloats = 6
};
constexpr int kFloat8 = 4;  // E4M3, beside the Kinds of stored.h

// Rows of the tile that begins where so many are left: kMost, or half of it, and so on.
template <int kMost = 8>
inline int height(int64_t left) {
  int high = kMost;
  while (high > left) high /= 2;
  return high;
}

// Mirrored in cpu/packed.py.
struct Packed {
  const float* x;           // [rows, inputs], rows `stride` apart
  const uint8_t* codes;     // panels, each of `panel_bytes` one after the other
  const void* scales;       // [panels, groups, 16 or with `shared` 1], of `scale_kind`
  const int8_t* zeros;      // [panels, groups, 16], or null
  const int32_t* columns;   // [inputs]: which column of x is in a place; or null for the same
  const void* minima;       // [panels, groups, 16] of `minimum_kind`, or null
  const void* outer_scales;  // fp16 [panels, groups >> outer_shift, 16]: what scales are times, or null
  const void* outer_minima;  // the same of minima
  const float* bias;        // [outputs] or null
  float* out;               // [rows, outputs], rows `out_stride` apart
  int64_t rows, inputs, outputs, stride, out_stride, panel_bytes, group, groups;
  int64_t input_group;      // columns of a row that are rounded together, for kFloats
  int32_t bits, codes_are, scale_kind, shared, plain_kind, planes, rounding, threads;
  int32_t minimum_kind, outer_shift;
  float divisor, factor;    // of all scales
  float largest, fixed, threshold;  // of rounded rows: steps, scale, and what is left as it is

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  // What whole codes are raised by, so that the least is 0; those of E2M1 are twice its numbers.
  int32_t middle() const {
    if (codes_are == kUnsigned) return 0;
    if (codes_are == kIQ4) return 127;
    return codes_are == kE2M1 ? 12 : 1 << (bits - 1);
  }
};

// Whether all numbers that a code can be fit into a register, and groups are long enough for that.
constexpr bool tabled(int codes, int bits) {
  return bits <= 4 && (codes == kWhole || codes == kUnsigned || codes == kIQ4);
}

// The levels of IQ4 (blocks/layouts.py).
alignas(64) constexpr float kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                           1,    13,   25,  38,  53,  69,  89,  113};

// Those of lanes of 0 to 15.
inline Vec iq4(Ints code) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permutexvar_ps((__m512i)code, _mm512_load_ps(kLevels));
#elif defined(__AVX2__)
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(kLevels), (__m256i)code);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(kLevels + 8), (__m256i)code);
  return code < 8 ? (Vec)low : (Vec)high;
#else
  Vec found;
  for (int i = 0; i < kRows; ++i) found[i] = kLevels[code[i]];
  return found;
#endif
}

// What E4M3 codes are worth, lanes of 0 to 255; none is NaN.
inline Vec e4m3(Ints code) {
  const Words byte = (Words)code;
  return floats((byte & 0x80) << 24 | (byte & 0x7f) << 20) * splat(0x1p120f);
}

// What E2M1 codes are worth, lanes of 0 to 15.
inline Vec e2m1(Ints code) {
#ifdef __AVX512F__
  const Vec all{0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  return (Vec)_mm512_permutexvar_ps((__m512i)code, (__m512)all);
#else
  const Words nibble = (Words)code, size = nibble & 7;
  const Vec small = __builtin_convertvector((Ints)size, Vec) * 0.5f;
  const Words large = (size << 22) + (126u << 23);
  return floats(((Ints)size < 2 ? words(small) : large) | (nibble & 8) << 28);
#endif
}

inline Vec load_e4m3(const uint8_t* from, int64_t left) {
  typedef uint8_t Raw __attribute__((vector_size(kRows)));
  const Raw bytes = load_raw<Raw>(from, left);
#if defined(__AVX512F__)  // GCC 12 converts bytes one by one
  return e4m3((Ints)_mm512_cvtepu8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return e4m3((Ints)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)bytes)));
#else
  return e4m3(__builtin_convertvector(bytes, Ints));
#endif
}

// `count` numbers of a kind, from `at` on.
[[gnu::always_inline]] inline Vec load_kind(const void* from, int32_t kind, int64_t at,
                                            int64_t count) {
  if (kind == kBFloat16) return load_stored(static_cast<const BFloat16*>(from) + at, count);
  if (kind == kFloat16) return load_stored(static_cast<const Float16*>(from) + at, count);
  if (kind == kFloat8) return load_e4m3(static_cast<const uint8_t*>(from) + at, count);
  if (kind == kInt8) return load_stored(static_cast<const int8_t*>(from) + at, count);
  return load_stored(static_cast<const float*>(from) + at, count);
}

// Numbers of groups: what those in memory are worth.
struct GroupNumbers {
  const void* from;   // [panels, groups, 16] of `kind`, or where they are shared [panels, groups]
  const void* outer;  // fp16 [panels, groups >> shift, 16]: what they are times, or null
  int64_t groups;
  int32_t kind, shared, shift;
  float divisor, factor;

  // Those of outputs of a panel, from output `first` on.
  [[gnu::always_inline]] Vec at(int64_t panel, int64_t group, int first) const {
    const int64_t cell = panel * groups + group;
    Vec found = load_kind(from, kind, shared ? cell : cell * kPanel + first, shared ? 1 : kRows);
    if (shared) found = splat(found[0]);
    if (outer) {
      const int64_t some = panel * (groups >> shift) + (group >> shift);
      found *= load_stored(static_cast<const Float16*>(outer) + some * kPanel + first, kRows);
    }
    if (divisor != 1.0f) found /= divisor;
    return factor == 1.0f ? found : found * factor;
  }
};

// What a code is worth to outputs, and what is taken away from their numbers, where anything is.
inline GroupNumbers scales_of(const Packed& p) {
  return {p.scales, p.outer_scales, p.groups, p.scale_kind, p.shared, p.outer_shift, p.divisor,
          p.factor};
}

inline GroupNumbers minima_of(const Packed& p) {
  return {p.minima, p.outer_minima, p.groups, p.minimum_kind, 0, p.outer_shift, 1.0f, 1.0f};
}

inline Vec scales_at(const Packed& p, int64_t panel, int64_t group, int first) {
  return scales_of(p).at(panel, group, first);
}

inline Vec minima_at(const Packed& p, int64_t panel, int64_t group, int first) {
  return minima_of(p).at(panel, group, first);
}

// Groups [from, end) of a panel, outputs from `first` on.
struct GroupSpan {
  int64_t panel, from, end;
  int first;
};

// Copies, which what is written cannot change, and a kind that no group asks for: by reference one row
// of E2M1 codes, 1024 x 1024 in caches, took 24 us in place of 21.
template <int kWide, int kKind>
inline void read_kind(GroupNumbers numbers, GroupSpan of, float* to) {
  numbers.kind = kKind;
  for (int64_t group = of.from; group < of.end; ++group)
    for (int part = 0; part < kWide; part += kRows, to += kRows)
      store_raw(numbers.at(of.panel, group, of.first + part), to, kRows);
}

// Numbers of kWide outputs of each group, as fp32: [groups, kWide].
template <int kWide>
inline void read_groups(const GroupNumbers& numbers, const GroupSpan& of, float* to) {
  switch (numbers.kind) {
    case kFloat32: return read_kind<kWide, kFloat32>(numbers, of, to);
    case kBFloat16: return read_kind<kWide, kBFloat16>(numbers, of, to);
    case kFloat16: return read_kind<kWide, kFloat16>(numbers, of, to);
    case kFloat8: return read_kind<kWide, kFloat8>(numbers, of, to);
    default: return read_kind<kWide, kInt8>(numbers, of, to);
  }
}

inline const int8_t* zeros_at(const Packed& p, int64_t panel, int64_t group, int first) {
  return p.zeros + (panel * p.groups + group) * kPanel + first;
}
