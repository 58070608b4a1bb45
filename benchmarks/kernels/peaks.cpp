// Loaded by peaks.py: as many products as the processor can do, in registers alone.

#include <immintrin.h>

#include <cstdint>

// 12 sums that do not wait for each other, `rounds` times.
#define TWELVE(instruction)                                                                  \
  asm volatile(instruction " %12, %12, %0\n\t" instruction " %12, %12, %1\n\t"               \
               instruction " %12, %12, %2\n\t" instruction " %12, %12, %3\n\t"               \
               instruction " %12, %12, %4\n\t" instruction " %12, %12, %5\n\t"               \
               instruction " %12, %12, %6\n\t" instruction " %12, %12, %7\n\t"               \
               instruction " %12, %12, %8\n\t" instruction " %12, %12, %9\n\t"               \
               instruction " %12, %12, %10\n\t" instruction " %12, %12, %11"                 \
               : "+v"(s[0]), "+v"(s[1]), "+v"(s[2]), "+v"(s[3]), "+v"(s[4]), "+v"(s[5]),     \
                 "+v"(s[6]), "+v"(s[7]), "+v"(s[8]), "+v"(s[9]), "+v"(s[10]), "+v"(s[11])    \
               : "v"(one))

#define PEAK(name, instruction)                                    \
  extern "C" void name(int64_t rounds) {                           \
    __m512 s[12] = {}, one = _mm512_set1_ps(0.0f);                 \
    for (int64_t round = 0; round < rounds; ++round) TWELVE(instruction); \
  }

PEAK(fma, "vfmadd231ps")      // 16 products of fp32
PEAK(vnni, "vpdpbusd")        // 64 products of bytes
PEAK(bf16, "vdpbf16ps")       // 32 products of bf16
