// Sums of two products of bf16 a lane, as vdpbf16ps has them on every instruction set.

#pragma once

#include <cstdint>
#include <cstring>

#include "stored.h"
#include "tile.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

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
