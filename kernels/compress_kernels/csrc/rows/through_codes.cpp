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
  float threshold;       // what stays as it is in LLM.int8(), a number of fp16
  int32_t codes, fixed, threads, kind;
};

namespace {

enum Codes { kWholeCodes = 0, kE4M3Codes = 1, kLLMInt8 = 2 };

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

// A row of LLM.int8(): seen in fp16, and without what reaches the threshold there. `out` may be x.
template <typename T>
void beside_outliers(const ThroughCodes& t, const T* x, T* out, int64_t count) {
  const auto seen = [&](Vec own) { return nearest_of(own, static_cast<const Float16*>(nullptr)); };
  const auto size = [](Vec number) { return floats(words(number) & 0x7fffffffu); };
  const Vec threshold = splat(t.threshold);
  Integers top{};
  for (int64_t c = 0; c < count; c += kRows) {
    const Vec usual = size(seen(load_stored(x + c, count - c)));
    const Integers bits = (Integers)words(usual >= threshold ? Vec{} : usual);  // NaN is the highest
    top = bits > top ? bits : top;
  }
  float sizes[kRows], most;
  std::memcpy(sizes, &top, sizeof sizes);
  most = largest_of(sizes, kRows);
  if (most == 0) most = 1.0f;
  const Vec factor = splat(1.0f / most * t.largest);  // as torch divides a number by a tensor
  const Vec scale = splat(most / t.largest);
  for (int64_t c = 0; c < count; c += kRows) {
    const Vec own = load_stored(x + c, count - c), near = seen(own);
    const Vec code = nearest_whole(near * factor);
    store_stored(size(near) >= threshold ? own : code * scale, out + c, count - c);
  }
}

// Numbers that share a scale, as their codes have it.
template <typename T>
void group_of(const ThroughCodes& t, const T* x, T* out, int64_t count) {
  if (t.codes == kLLMInt8) beside_outliers(t, x, out, count);
  else if (t.codes == kE4M3Codes) part<true>(t, x, out, count);
  else part<false>(t, x, out, count);
}

template <typename T>
void all_rows(const ThroughCodes& t) {
  row_by_row(t.threads, t.rows, t.width, [&](int64_t row) {
    for (int64_t c = 0; c < t.width; c += t.group) {
      const int64_t count = std::min(t.group, t.width - c);
      const T* x = static_cast<const T*>(t.x) + row * t.stride + c;
      T* out = static_cast<T*>(t.out) + row * t.out_stride + c;
      group_of(t, x, out, count);
    }
  });
}

}  // namespace

extern "C" void through_codes(const ThroughCodes* t) {
  t->kind == kFloat32 ? all_rows<float>(*t) : all_rows<BFloat16>(*t);
}
