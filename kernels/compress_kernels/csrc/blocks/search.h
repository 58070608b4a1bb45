// The grid of a sub-block: step and offset with the least weighted squared error, of kRows rows at
// once. The specification is compress_kernels/blocks/scales.py.

#pragma once

#include "blocks/levels.h"

// For a level q, value = step * q - offset. Sums weigh each number by w: of levels, their squares,
// and their products with x.
struct Sums {
  Vec q{}, qq{}, qx{};
};

// gain: by how much the weighted squared error is less than that of zeros.
struct Grid1 {
  Vec step{}, offset{}, gain{};
};

// Of the numbers of a sub-block, whatever their codes.
struct Whole {
  Vec w{}, x{}, low, high;
  Whole(const Vec* values, const Vec* weights, int count) : low(values[0]), high(values[0]) {
    for (int c = 0; c < count; ++c) {
      w += weights[c];
      x += weights[c] * values[c];
      low = least(low, values[c]);
      high = most(high, values[c]);
    }
  }
  Vec extreme() const { return high > -low ? high : low; }
};

// Candidates whose sums are made side by side: one alone waits for its own.
constexpr int kSide = 4;

template <int kCount, class Levels>
inline void sums_of(const Vec* x, const Vec* w, int count, const Vec* inverse, const Vec* offset,
                    const Levels& levels, Sums* s) {
  for (int i = 0; i < kCount; ++i) s[i] = Sums{};
  for (int c = 0; c < count; ++c)
    for (int i = 0; i < kCount; ++i) {
      const Vec q = levels((x[c] + offset[i]) * inverse[i]), weighted = w[c] * q;
      s[i].q += weighted;
      s[i].qq += weighted * q;
      s[i].qx += weighted * x[c];
    }
}

// Step and offset that suit levels best. free: the offset may be below 0.
inline Grid1 fit(const Whole& whole, const Sums& s, bool offsets, bool free) {
  const Vec zero{};
  const Vec alone = s.qq > zero ? s.qx / s.qq : zero;
  Grid1 g{alone, zero, alone * s.qx};
  if (!offsets) return g;
  const Vec spread = whole.w * s.qq - s.q * s.q;
  const auto apart = spread > splat(1e-6f) * (whole.w * s.qq);
  const Vec step = apart ? (whole.w * s.qx - s.q * whole.x) / spread : zero;
  const Vec offset = whole.w > zero ? (step * s.q - whole.x) / whole.w : zero;
  const auto better = (free ? step == step : offset >= zero) & (step >= zero);
  g.step = better ? step : most(alone, zero);
  g.offset = better ? offset : zero;
  g.gain = better ? step * s.qx - offset * whole.x : most(alone, zero) * s.qx;
  return g;
}

// Ranges that are tried. Without an offset: steps as shares of the largest number, `first`. With
// one: what is left of the lowest and the highest number.
struct Candidates {
  const float *first, *second;
  int32_t count, rounds;
};

template <bool kOffset, class Levels>
Grid1 search(const Vec* x, const Vec* w, const BlockKind& kind, const Candidates& tried,
             const Levels& levels) {
  const Whole whole(x, w, kind.sub);
  const bool free = kind.minima == 1;
  const Vec low = free ? whole.low : least(whole.low, Vec{}), extreme = whole.extreme();
  const Vec steps = splat((1 << kind.bits) - 1);
  Grid1 best{};
  best.gain = splat(-1e38f);
  const auto keep = [&](const Sums& s) {
    const Grid1 g = fit(whole, s, kOffset, free);
    const auto better = g.gain > best.gain;
    best.step = better ? g.step : best.step;
    best.offset = better ? g.offset : best.offset;
    best.gain = better ? g.gain : best.gain;
  };
  Sums s[kSide];
  for (int from = 0; from < tried.count; from += kSide) {
    Vec inverse[kSide], offset[kSide];
    for (int i = 0; i < kSide; ++i) {
      const int at = std::min(from + i, tried.count - 1);
      if (kOffset) {
        offset[i] = -(low * splat(tried.first[at]));
        inverse[i] = inverse_of((whole.high * splat(tried.second[at]) + offset[i]) / steps);
      } else {
        offset[i] = Vec{};
        inverse[i] = inverse_of(extreme * splat(tried.first[at]));
      }
    }
    sums_of<kSide>(x, w, kind.sub, inverse, offset, levels, s);
    for (int i = 0; i < kSide; ++i) keep(s[i]);
  }
  for (int round = 0; round < tried.rounds; ++round) {
    const Vec inverse = inverse_of(best.step), offset = best.offset;
    sums_of<1>(x, w, kind.sub, &inverse, &offset, levels, s);
    keep(s[0]);
  }
  return best;
}
