// Scales and minima of a super-block's sub-blocks as whole numbers of d and dmin, chosen together:
// kRows rows at once. The specification is compress_kernels/blocks/scales.py.

#pragma once

#include "blocks/search.h"

struct Shared {
  Vec d{}, dmin{}, loss{}, scale[kSubs]{}, minimum[kSubs]{};
};

// ratios: of the largest scale, or minimum, that d and dmin are tried for. rounds: of new whole
// numbers for d and dmin, and new d and dmin for them.
struct SharedCandidates {
  const float *scales, *minima;
  int32_t scale_count, minimum_count, rounds, reach;
};

template <bool kOffset, class Levels>
struct Block {
  const BlockKind& kind;
  const Levels& levels;
  const Vec *x, *w;

  int subs() const { return kind.numbers / kind.sub; }
  const Vec* numbers(int j) const { return x + j * kind.sub; }
  const Vec* weights(int j) const { return w + j * kind.sub; }

  // Weighted squared errors of a sub-block on kCount grids.
  template <int kCount>
  void losses(int j, const Vec* step, const Vec* offset, Vec* loss) const {
    Vec inverse[kCount];
    for (int i = 0; i < kCount; ++i) inverse[i] = inverse_of(step[i]), loss[i] = Vec{};
    const Vec *value = numbers(j), *weight = weights(j);
    for (int c = 0; c < kind.sub; ++c)
      for (int i = 0; i < kCount; ++i) {
        const Vec q = levels((value[c] + offset[i]) * inverse[i]);
        const Vec error = value[c] - (step[i] * q - offset[i]);
        loss[i] += weight[c] * (error * error);
      }
  }

  Sums sums(int j, const Vec& step, const Vec& offset) const {
    Sums s;
    const Vec inverse = inverse_of(step);
    sums_of<1>(numbers(j), weights(j), kind.sub, &inverse, &offset, levels, &s);
    return s;
  }
};

inline Vec whole_number(Vec x, int low, int high) {
  return nearest(least(most(x, splat(low)), splat(high)));
}

// d, and dmin, for which the grids that sub-blocks want are met best, their codes unchanged.
template <bool kOffset, class Levels>
Shared first_choice(const Block<kOffset, Levels>& b, const SharedCandidates& tried,
                    const Grid1* wanted) {
  const int subs = b.subs();
  Sums s[kSubs];
  Vec weight[kSubs], weighted[kSubs], largest{}, most_offset{};
  for (int j = 0; j < subs; ++j) {
    s[j] = b.sums(j, wanted[j].step, wanted[j].offset);
    const Whole whole(b.numbers(j), b.weights(j), b.kind.sub);
    weight[j] = whole.w, weighted[j] = whole.x;
    largest = size_of(wanted[j].step) > size_of(largest) ? wanted[j].step : largest;
    most_offset = size_of(wanted[j].offset) > size_of(most_offset) ? wanted[j].offset : most_offset;
  }
  Shared best;
  best.loss = splat(1e38f);
  for (int i = 0; i < tried.scale_count; ++i) {
    Shared now;
    now.d = round_half(largest * splat(tried.scales[i]));
    const Vec inverse = inverse_of(now.d);
    Vec step[kSubs], offset[kSubs], base{};
    for (int j = 0; j < subs; ++j) {
      now.scale[j] = whole_number(wanted[j].step * inverse, b.kind.scale_low, b.kind.scale_high);
      step[j] = now.d * now.scale[j];
      base += step[j] * (step[j] * s[j].qq - (s[j].qx + s[j].qx));
      if (kOffset)
        offset[j] = weight[j] > Vec{} ? (step[j] * s[j].q - weighted[j]) / weight[j] : Vec{};
    }
    for (int k = 0; k < (kOffset ? tried.minimum_count : 1); ++k) {
      now.loss = base;
      if (kOffset) {
        now.dmin = round_half(most_offset * splat(tried.minima[k]));
        const Vec part = inverse_of(now.dmin);
        for (int j = 0; j < subs; ++j) {
          now.minimum[j] = b.kind.minima == 1 ? splat(1.0f)
                                              : whole_number(offset[j] * part, 0, b.kind.minima);
          const Vec o = now.dmin * now.minimum[j], both = weighted[j] - step[j] * s[j].q;
          now.loss += o * (o * weight[j] + (both + both));
        }
      }
      const auto better = now.loss < best.loss;
      best.loss = better ? now.loss : best.loss;
      best.d = better ? now.d : best.d;
      best.dmin = better ? now.dmin : best.dmin;
      for (int j = 0; j < subs; ++j) {
        best.scale[j] = better ? now.scale[j] : best.scale[j];
        best.minimum[j] = better ? now.minimum[j] : best.minimum[j];
      }
    }
  }
  return best;
}

// New whole numbers, up to `reach` from the ones that are there, with codes chosen anew for each.
template <bool kOffset, class Levels>
void nearby(const Block<kOffset, Levels>& b, int reach, Shared& now) {
  const BlockKind& kind = b.kind;
  const bool fixed = kind.scale_low == kind.scale_high;
  const int by = fixed ? 0 : reach, across = kOffset && kind.minima > 1 ? reach : 0;
  now.loss = Vec{};
  for (int j = 0; j < b.subs(); ++j) {
    const Vec scale = now.scale[j], minimum = now.minimum[j];
    Vec best = splat(1e38f), best_scale = scale, best_minimum = minimum;
    for (int ds = -by; ds <= by; ++ds) {
      const Vec s = least(most(scale + splat(ds), splat(kind.scale_low)), splat(kind.scale_high));
      for (int from = -across; from <= across; from += 3) {
        Vec m[3], step[3], offset[3], loss[3];
        for (int i = 0; i < 3; ++i) {
          const int dm = std::min(from + i, across);
          m[i] = across ? least(most(minimum + splat(dm), Vec{}), splat(kind.minima)) : minimum;
          step[i] = now.d * s, offset[i] = kOffset ? now.dmin * m[i] : Vec{};
        }
        if (across) b.template losses<3>(j, step, offset, loss);
        else b.template losses<1>(j, step, offset, loss);
        for (int i = 0; i < (across ? 3 : 1); ++i) {
          const auto better = loss[i] < best;
          best_scale = better ? s : best_scale;
          best_minimum = better ? m[i] : best_minimum;
          best = better ? loss[i] : best;
        }
      }
    }
    now.scale[j] = best_scale, now.minimum[j] = best_minimum;
    now.loss += best;
  }
}

// d and dmin that suit whole numbers and codes best: least squares over the super-block.
template <bool kOffset, class Levels>
void refit(const Block<kOffset, Levels>& b, Shared& now) {
  const Vec zero{};
  Vec aa{}, ab{}, bb{}, ax{}, bx{};
  for (int j = 0; j < b.subs(); ++j) {
    const Vec scale = now.scale[j], minimum = now.minimum[j];
    const Sums s = b.sums(j, now.d * scale, kOffset ? now.dmin * minimum : zero);
    aa += scale * scale * s.qq;
    ax += scale * s.qx;
    if (!kOffset) continue;
    const Whole whole(b.numbers(j), b.weights(j), b.kind.sub);
    ab += scale * minimum * s.q;
    bb += minimum * minimum * whole.w;
    bx += minimum * whole.x;
  }
  const Vec alone = aa > zero ? ax / aa : now.d;
  if (!kOffset) {
    now.d = round_half(alone);
    return;
  }
  const Vec spread = aa * bb - ab * ab;
  const auto apart = spread > splat(1e-6f) * (aa * bb);
  const Vec d = apart ? (ax * bb - bx * ab) / spread : alone;
  const Vec dmin = apart ? (d * ab - bx) / bb : zero;
  const auto better = b.kind.minima == 1 ? apart : (apart & (dmin >= zero));
  now.d = round_half(better ? d : alone);
  now.dmin = round_half(better ? dmin : zero);
}

template <bool kOffset, class Levels>
Shared share(const Block<kOffset, Levels>& b, const SharedCandidates& tried, const Grid1* wanted) {
  Shared now = first_choice(b, tried, wanted), best;
  for (int round = 0; round < tried.rounds; ++round) {
    if (round) refit(b, now);
    nearby(b, tried.reach, now);
    if (!round) best = now;
    const auto better = now.loss < best.loss;
    best.loss = better ? now.loss : best.loss;
    best.d = better ? now.d : best.d;
    best.dmin = better ? now.dmin : best.dmin;
    for (int j = 0; j < b.subs(); ++j) {
      best.scale[j] = better ? now.scale[j] : best.scale[j];
      best.minimum[j] = better ? now.minimum[j] : best.minimum[j];
    }
  }
  return best;
}
