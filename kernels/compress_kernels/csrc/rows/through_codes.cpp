// Rows as codes give them back: rounded to E4M3 or whole numbers under scales of their own, times
// the scales again. In bf16 scales, quotients and products are each rounded, as torch does it.

#include <cstdint>

#include "e4m3.h"
#include "parallel.h"
#include "rows.h"

// Mirrored in cpu/through_codes.py.
struct ThroughCodes {
  const void* x;  // [rows, width], rows `stride` apart, fp32 or bf16
  void* out;      // the same, rows `out_stride` apart; may be x
  int64_t rows, width, stride, out_stride, group;  // group: columns that share a scale
  float largest, scale;  // what the largest magnitude lands on; or with `fixed` the scale of all
  int32_t floats, fixed, threads, kind;
};

namespace {

constexpr int64_t kGrain = 64 << 10;  // numbers worth a thread
// Of a dtype.
inline float epsilon_of(const float*) { return 0x1p-23f; }
inline float epsilon_of(const BFloat16*) { return 0x1p-7f; }

inline Vec nearest_whole(Vec x) {
  const Vec apart = splat(0x1p23f);
  return with_sign((floats(words(x) & 0x7fffffffu) + apart) - apart, x);
}

// Numbers that share a scale.
template <bool kFloats, typename T>
void part(const ThroughCodes& t, const T* x, T* out, int64_t count) {
  float one = t.scale;
  if (!t.fixed) {
    const float scale = settled<T>(splat(largest_of(x, count) / t.largest))[0];
    one = scale == 0 ? epsilon_of(x) : scale;
  }
  const Vec scale = splat(one);
  const Vec low = splat(kFloats ? -448.0f : -(t.largest + 0.5f));
  const Vec high = splat(kFloats ? 448.0f : t.largest - 0.5f);
  const auto round = [&](int64_t c, int64_t left) {
    const Vec whole = settled<T>(load_stored(x + c, left) / scale);
    Vec code = whole < low ? low : whole;
    code = code > high ? high : code;
    code = kFloats ? nearest_e4m3(code) : nearest_whole(code);
    store_stored((whole == whole ? code : whole) * scale, out + c, left);
  };
  int64_t c = 0;
  for (; c + kRows <= count; c += kRows) round(c, kRows);
  if (c < count) round(c, count - c);
}

template <typename T>
void all_rows(const ThroughCodes& t) {
  const int64_t grain = 1 + kGrain / (t.width + 1);
  in_parallel(t.threads, t.rows, grain, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row)
      for (int64_t c = 0; c < t.width; c += t.group) {
        const int64_t count = std::min(t.group, t.width - c);
        const T* x = static_cast<const T*>(t.x) + row * t.stride + c;
        T* out = static_cast<T*>(t.out) + row * t.out_stride + c;
        t.floats ? part<true>(t, x, out, count) : part<false>(t, x, out, count);
      }
  });
}

}  // namespace

extern "C" void through_codes(const ThroughCodes* t) {
  t->kind == kFloat32 ? all_rows<float>(*t) : all_rows<BFloat16>(*t);
}
