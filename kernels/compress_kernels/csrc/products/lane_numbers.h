// Decoded numbers of codes in panels of the layout "dots", as pairs of bf16: lanes are outputs.

#pragma once

#include <cstring>

#include "numbers.h"

// What the code in bits [shift, shift + kBits) of a lane is worth: whole codes off their middle, E4M3
// numbers 2^-120 times theirs.
template <int kBits, int kCodes>
inline Vec level_at(Ints codes, int shift) {
  if constexpr (kCodes == kE4M3)  // the sign goes into what the exponent has more
    return floats((Words)((Ints)((Words)codes << (24 - shift)) >> 4) & 0x87f00000u);
  if constexpr (kCodes == kWhole && kBits == 8) {
    const Ints off = codes ^ static_cast<int32_t>(0x80808080);
    return __builtin_convertvector((Ints)((Words)off << (24 - shift)) >> 24, Vec);
  }
  const Ints moved = shift ? (Ints)((Words)codes >> shift) : codes;
  constexpr int kMiddle = kCodes == kWhole ? 1 << (kBits - 1) : 0;
#ifdef __AVX512F__  // a permutation reads four bits, one of two registers five
  const Vec all{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if constexpr (kCodes == kE2M1) return e2m1(moved);
  if constexpr (kCodes == kIQ4) return iq4(moved);
  if constexpr (kBits == 4)
    return (Vec)_mm512_permutexvar_ps((__m512i)moved, (__m512)(all - splat(kMiddle)));
  if constexpr (kCodes == kUnsigned && kBits == 8)
    return (Vec)_mm512_permutex2var_ps((__m512)all, (__m512i)moved, (__m512)(all + splat(16)));
#endif
  const Ints code = moved & ((1 << kBits) - 1);
  if constexpr (kCodes == kE2M1) return e2m1(code);
  else if constexpr (kCodes == kIQ4) return iq4(code);
  else return __builtin_convertvector(code - kMiddle, Vec);
}

// Two numbers of each lane in bf16, the first in the lower half. kNormal: none is below 2^-126 but 0,
// which the instruction gives for such.
template <bool kNormal>
inline Words pair_of(Vec low, Vec high) {
#ifdef __AVX512BF16__
  if constexpr (kNormal) {
    alignas(64) static constexpr uint16_t kTurns[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (Words)_mm512_permutexvar_epi16(_mm512_load_si512(kTurns), apart);
  }
#endif
  constexpr const BFloat16* kind = nullptr;
  return words(nearest_of(low, kind)) >> 16 | (words(nearest_of(high, kind)) & 0xffff0000u);
}

// Numbers of a group of columns and kRows outputs of a panel, rounded to fp16 first where they are.
// kZeros: whether codes have zeros of their own.
template <int kBits, int kCodes, int kPlain, bool kZeros>
struct LaneNumbers {
  static constexpr bool kMinima = kCodes == kUnsigned, kRaised = kCodes == kE4M3;
  Vec scale, zero, minimum;
  bool normal;

  void read(const Packed& p, int64_t panel, int64_t group, int first) {
    scale = scales_at(p, panel, group, first);
    if (kZeros) zero = load_stored(zeros_at(p, panel, group, first), kRows);
    if (kMinima) minimum = p.minima ? minima_at(p, panel, group, first) : Vec{};
    normal = usual(scale) && (!kMinima || usual(minimum));
    if (kRaised && normal) scale *= kUp;
  }

  // Writes columns 0 and 1, 2 and 3, ... of a vector of codes, `step` words apart.
  void store_pairs(Ints codes, uint32_t* to, int64_t step) const {
    if (normal) store<true>(codes, to, step);
    else store<false>(codes, to, step);
  }

 private:
  static constexpr float kUp = 0x1p120f;

  // Whether sums and products of a code that is no 0 stay above 2^-126: levels are 2^-9 at least, and
  // both sides of a difference multiples of 2^-126. And whether E4M3's scales may be raised.
  static bool usual(Vec numbers) {
#ifdef __AVX512F__
    const __m512 sizes = _mm512_abs_ps((__m512)numbers);
    const __mmask16 small = _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(0x1p-100f), _CMP_LT_OQ);
    const __mmask16 odd = _mm512_mask_cmp_ps_mask(small, sizes, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    const float most = kRaised ? 0x1p7f : __builtin_inff();
    return (odd | _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(most), _CMP_NLE_UQ)) == 0;
#else
    return false;  // who rounds by hand needs no difference
#endif
  }

  template <bool kNormal>
  Vec at(Ints codes, int shift) const {
    Vec x = level_at<kBits, kCodes>(codes, shift);
    if (kRaised && !kNormal) x *= kUp;
    if (kZeros) x -= zero;
    x *= scale;
    if (kMinima) x -= minimum;  // the product is exact: fused or not
    return plain<kPlain>(x);
  }

  template <bool kNormal>
  void store(Ints codes, uint32_t* to, int64_t step) const {
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += kBits)
#pragma GCC unroll 2
      for (int b = 0; b < 32; b += 16, to += step) {
        const Words pair =
            pair_of<kNormal>(at<kNormal>(codes, b + j), at<kNormal>(codes, b + 8 + j));
        std::memcpy(to, &pair, sizeof pair);
      }
  }
};
