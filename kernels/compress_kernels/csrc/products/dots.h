// Sums of products that lie in a lane: of four bytes, exact on every instruction set, and of two
// numbers of bf16, as vdpbf16ps has them.

#pragma once

#include <cstdint>
#include <cstring>

#include "stored.h"
#include "tile.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

typedef int32_t Ints __attribute__((vector_size(kRows * 4)));

inline Ints every(int32_t x) { return x - Ints{}; }

// sums + of each lane the four bytes of codes (0 to 255) times those of inputs (-128 to 127).
inline Ints dot(Ints sums, Ints codes, Ints inputs) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)inputs);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  // Pairs of 16 bits: vpmaddubsw would saturate codes of 8 bits.
  const __m512i c = (__m512i)codes, x = (__m512i)inputs, low = _mm512_set1_epi16(255);
  const __m512i even = _mm512_madd_epi16(
      _mm512_and_si512(c, low), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(c, 8), _mm512_srai_epi16(x, 8));
  return sums + (Ints)even + (Ints)odd;
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i c = (__m256i)codes, x = (__m256i)inputs, low = _mm256_set1_epi16(255);
  const __m256i even = _mm256_madd_epi16(
      _mm256_and_si256(c, low), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(c, 8), _mm256_srai_epi16(x, 8));
  return sums + (Ints)even + (Ints)odd;
#else
  for (int byte = 0; byte < 32; byte += 8)
    sums += ((codes >> byte) & 255) * ((inputs << (24 - byte)) >> 24);
  return sums;
#endif
}

// total + of each lane a number times a factor, rounded once.
inline Vec add_product(Vec total, Vec number, Vec factor) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)number, (__m512)factor, (__m512)total);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)number, (__m256)factor, (__m256)total);
#else
  for (int i = 0; i < kRows; ++i) total[i] = __builtin_fmaf(number[i], factor[i], total[i]);
  return total;
#endif
}

// sum + of each lane the upper numbers' product, then the lower ones', each sum rounded once to the
// nearest. A product of two bf16 is exact in fp32, so it does not matter where it is not fused, but
// for one below 2^-126.
inline Vec add_pairs(Vec sum, Words x, Words w) {
#ifdef __AVX512BF16__
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
  sum = fused(floats(x & 0xffff0000u), floats(w & 0xffff0000u), sum);
  return fused(floats(x << 16), floats(w << 16), sum);
#endif
}

// The instruction takes numbers below 2^-126 for 0 and gives none. Where it is missing, a processor
// of its kind does the same as long as one of these is there.
struct AsInstruction {
#if defined(__x86_64__) && !defined(__AVX512BF16__)
  const unsigned before = _mm_getcsr();
  AsInstruction() { _mm_setcsr(before | 0x8040); }
  ~AsInstruction() { _mm_setcsr(before); }
#endif
};
