// Loaded by pairs.py: as many products of bf16 as the processor can do, in registers alone.

#include <immintrin.h>

#include <cstdint>

// 12 sums that do not wait for each other, `rounds` times; an instruction has 32 products.
extern "C" float peak(int64_t rounds) {
  __m512 a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{}, i{}, j{}, k{}, l{};
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (int64_t round = 0; round < rounds; ++round)
    asm volatile(
        "vdpbf16ps %12, %12, %0\n\tvdpbf16ps %12, %12, %1\n\tvdpbf16ps %12, %12, %2\n\t"
        "vdpbf16ps %12, %12, %3\n\tvdpbf16ps %12, %12, %4\n\tvdpbf16ps %12, %12, %5\n\t"
        "vdpbf16ps %12, %12, %6\n\tvdpbf16ps %12, %12, %7\n\tvdpbf16ps %12, %12, %8\n\t"
        "vdpbf16ps %12, %12, %9\n\tvdpbf16ps %12, %12, %10\n\tvdpbf16ps %12, %12, %11"
        : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i),
          "+v"(j), "+v"(k), "+v"(l)
        : "v"(ones));
  return _mm512_reduce_add_ps(a + b + c + d + e + f + g + h + i + j + k + l);
}
