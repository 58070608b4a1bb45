// Levels that codes stand for, kRows rows at a time.

#pragma once

#include <algorithm>

#include "blocks/bytes.h"
#include "tile.h"

inline Vec least(Vec a, Vec b) { return a < b ? a : b; }
inline Vec most(Vec a, Vec b) { return a > b ? a : b; }
// Round half to even for |x| < 2^22: the sum keeps no fraction bits. Callers clamp x first.
inline Vec nearest(Vec x) { return (x + 12582912.0f) - 12582912.0f; }
inline Vec size_of(Vec x) { return most(x, -x); }
inline Vec inverse_of(Vec x) { return x == splat(0.0f) ? splat(0.0f) : splat(1.0f) / x; }

inline Vec round_half(Vec x) {
  for (int r = 0; r < kRows; ++r) x[r] = from_half(to_half(x[r]));
  return x;
}

// Whole numbers from `low` on.
struct WholeLevels {
  Vec low, high;
  explicit WholeLevels(const BlockKind& kind)
      : low(splat(-kind.centre)), high(splat((1 << kind.bits) - 1 - kind.centre)) {}
  Vec operator()(Vec y) const { return nearest(least(most(y, low), high)); }
  Vec code(Vec level) const { return level - low; }
};

constexpr float kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Those of the IQ4 types.
struct TableLevels {
  explicit TableLevels(const BlockKind&) {}
  Vec operator()(Vec y) const {
    Vec level = splat(kTable[0]);
    for (int i = 0; i < 15; ++i)
      level += y > splat((kTable[i] + kTable[i + 1]) / 2) ? splat(kTable[i + 1] - kTable[i]) : Vec{};
    return level;
  }
  Vec code(Vec level) const {
    Vec code{};
    for (int i = 0; i < 15; ++i) code += level > splat(kTable[i]) ? splat(1.0f) : Vec{};
    return code;
  }
};
