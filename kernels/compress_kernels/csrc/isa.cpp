// What this library was compiled for, by the names of /proc/cpuinfo.

extern "C" const char* instruction_sets() {
  return ""
#ifdef __AVX2__
         "avx2 "
#endif
#ifdef __AVX512F__
         "avx512f "
#endif
#ifdef __AVX512VNNI__
         "avx512_vnni "
#endif
#ifdef __AVX512BF16__
         "avx512_bf16 "
#endif
      ;
}
