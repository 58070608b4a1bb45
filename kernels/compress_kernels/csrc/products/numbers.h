// Decoded numbers of codes in panels of the layout "rows".

#pragma once

#include <cstring>
#include <type_traits>

#include "panels.h"

// Scales, zeros and minima of a group of a panel.
struct Grid {
  float scale[kPanel], zero[kPanel], minimum[kPanel];

  void read(const Packed& p, int64_t panel, int64_t group) {
    for (int part = 0; part < kPanel; part += kRows) {
      const Vec scales = scales_at(p, panel, group, part);
      Vec zeros = splat(p.codes_are == kWhole ? p.middle() : 0);
      if (p.zeros) zeros += load_stored(zeros_at(p, panel, group, part), kRows);
      std::memcpy(scale + part, &scales, sizeof scales);
      std::memcpy(zero + part, &zeros, sizeof zeros);
      if (p.codes_are != kUnsigned) continue;
      const Vec minima = p.minima ? minima_at(p, panel, group, part) : Vec{};
      std::memcpy(minimum + part, &minima, sizeof minima);
    }
  }
};

// The dtype that dense weights have; numbers are rounded to it once.
template <int kPlain>
using Plain = std::conditional_t<kPlain == kBFloat16, BFloat16,
                                 std::conditional_t<kPlain == kFloat16, Float16, float>>;

template <int kPlain>
inline Vec plain(Vec x) {
  return nearest_of(x, static_cast<const Plain<kPlain>*>(nullptr));
}

// Numbers of an output's group, computed one by one.
template <int kOf, int kCodes, int kPlain>
struct Values {
  static constexpr int kBits = kOf;
  // Whether a chunk may have one group and no tables that are better.
  static constexpr bool kLong =
      kCodes == kWhole || kCodes == kUnsigned || (kCodes == kE4M3 && kPlain != kBFloat16);
  Vec scale, zero, minimum;

  void read(const Packed&, const Grid& grid, int output) {
    scale = splat(grid.scale[output]);
    if (kCodes == kWhole) zero = splat(grid.zero[output]);
    if (kCodes == kUnsigned) minimum = splat(grid.minimum[output]);
  }

  // Of the columns 16 * j on.
  Vec at(Ints codes, int j) const {
    if constexpr (kCodes == kE4M3) {
      const Words top = (Words)codes << (24 - 8 * j);
      const Vec number = floats((top & 0x80000000u) | (top >> 4 & 0x07f00000u)) * splat(0x1p120f);
      return plain<kPlain>(number * scale);
    }
    const Ints code = (codes >> (kBits * j)) & ((1 << kBits) - 1);
    if constexpr (kCodes == kE2M1) return plain<kPlain>(e2m1(code) * scale);
    else if constexpr (kCodes == kIQ4) return plain<kPlain>(iq4(code) * scale);
    else if constexpr (kCodes == kUnsigned)  // the product is exact: fused or not
      return plain<kPlain>(__builtin_convertvector(code, Vec) * scale - minimum);
    else return plain<kPlain>((__builtin_convertvector(code, Vec) - zero) * scale);
  }
};

#ifdef __AVX512F__
// All numbers that whole codes of an output's group can be, one a lane; of 2 bits four times.
template <int kOf>
struct Table {
  static constexpr int kBits = kOf;
  static constexpr bool kLong = true;
  Vec numbers;

  void read(const Packed& p, const Grid& grid, int output) {
    const Ints places{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec codes = p.codes_are == kIQ4
                          ? iq4(places)
                          : __builtin_convertvector(places & ((1 << kBits) - 1), Vec);
    Vec x = (codes - splat(grid.zero[output])) * splat(grid.scale[output]);
    if (p.minima) x -= splat(grid.minimum[output]);
    numbers = p.plain_kind == kBFloat16  ? plain<kBFloat16>(x)
              : p.plain_kind == kFloat16 ? plain<kFloat16>(x)
                                         : x;
  }

  Vec at(Ints codes, int j) const {
    return (Vec)_mm512_permutexvar_ps((__m512i)(codes >> (kBits * j)), (__m512)numbers);
  }
};
#endif
