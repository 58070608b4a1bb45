// The nearest E4M3 numbers.

#pragma once

#include "stored.h"

inline Vec with_sign(Vec size, Vec of) { return floats(words(size) | (words(of) & 0x80000000u)); }

// Of lanes from -448 to 448. Where numbers are 2^e apart, 2^(e + 23) added and taken away again
// rounds to them, ties to even.
inline Vec nearest_e4m3(Vec x) {
  const Words size = words(x) & 0x7fffffffu;
  const Vec normal = floats((size & 0x7f800000u) + (20u << 23)), least = splat(0x1p14f);
  const Vec apart = normal > least ? normal : least;
  return with_sign((floats(size) + apart) - apart, x);
}
