// GPTQ column loop of one block, and the scale search, on tiles of kRows rows; see lazy.py for the
// form.
//
// Rows never interact, so a tile holds kRows of them transposed, [column][kRows rows]: every step of
// the loop is one vector operation, and no result depends on the number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace {

enum ScaleKind { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline Vec least(Vec a, Vec b) { return a < b ? a : b; }
inline Vec most(Vec a, Vec b) { return a > b ? a : b; }

// Round half to even for |x| < 2^22: the sum keeps no fraction bits. Callers clamp x first.
inline Vec nearest(Vec x) { return (x + 12582912.0f) - 12582912.0f; }

float round_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

float round_float16(float x) {
  if (x < 6.103515625e-5f) return (x + 0.75f) - 0.75f;  // subnormal: multiples of 2^-24
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Nearest value that the stored dtype holds, 1 in place of 0.
float round_scale(float scale, int kind) {
  float x = std::fabs(scale);
  if (kind == kBFloat16) x = round_bfloat16(std::fmin(x, 3.3895314e38f));
  if (kind == kFloat16) x = round_float16(std::fmin(x, 65504.0f));
  return x == 0.0f ? 1.0f : std::copysign(x, scale);
}

struct Scale {
  Vec step, zero;
};

}  // namespace

// Both structs are mirrored in cpu/library.py.
struct Grid {
  float code_min, code_max;
  int32_t symmetric, scale_kind;
  const float* ratios;
  int64_t ratio_count;
};

struct Block {
  const float* weight;      // [rows, width], row stride weight_stride
  const float* factor;      // [width, width], diagonal block of R
  const float* importance;  // [width] or null
  const int32_t* groups;    // [width], group of each column
  float* scale;             // [rows, *], row stride group_stride
  int8_t* zero;             // as scale, or null when symmetric
  int8_t* codes;            // [rows, width], row stride out_stride
  float* quantized;         // as codes; on entry the pull of earlier blocks
  float* lost;              // [rows, width], weight - quantized
  int64_t rows, width, weight_stride, group_stride, out_stride;
  int32_t search, pulled, threads;
};

namespace {

Scale candidate(Vec low, Vec high, float ratio, const Grid& grid) {
  const float steps = grid.code_max - grid.code_min;
  Scale s{splat(1.0f), splat(0.0f)};
  if (grid.symmetric) {
    Vec step = most(-low, high) / splat(steps / 2) * splat(ratio);
    for (int r = 0; r < kRows; ++r) s.step[r] = round_scale(step[r], grid.scale_kind);
    return s;
  }
  low *= splat(ratio);
  high *= splat(ratio);
  // Keeps the compiler from fusing product and difference, which would round otherwise than torch.
  asm("" : "+m"(low), "+m"(high));
  Vec step = (high - low) / splat(steps);
  for (int r = 0; r < kRows; ++r) s.step[r] = round_scale(step[r], grid.scale_kind);
  // low / step may be huge when a subnormal scale was rounded down: clamp before rounding.
  Vec zero = most(splat(grid.code_min) - low / s.step, splat(grid.code_min));
  s.zero = nearest(least(zero, splat(grid.code_max)));
  return s;
}

// Candidates whose losses are summed side by side: one alone waits for its own sums.
constexpr int kCandidates = 4;

template <bool kWeighted, int kCount>
void losses(const Vec* tile, int64_t width, const float* importance, const Scale* s,
            const Grid& grid, Vec* sum) {
  Vec inverse[kCount], least_code[kCount], most_code[kCount];
  for (int i = 0; i < kCount; ++i) {
    // A product with 1/step may pick the other code only where both are equally far off.
    inverse[i] = splat(1.0f) / s[i].step;
    least_code[i] = splat(grid.code_min) - s[i].zero;
    most_code[i] = splat(grid.code_max) - s[i].zero;
    sum[i] = Vec{};
  }
  for (int64_t c = 0; c < width; ++c)
    for (int i = 0; i < kCount; ++i) {
      Vec code = nearest(least(most(tile[c] * inverse[i], least_code[i]), most_code[i]));
      Vec error = tile[c] - code * s[i].step;
      sum[i] += kWeighted ? error * error * importance[c] : error * error;
    }
}

template <bool kWeighted>
Scale least_loss(const Vec* tile, int64_t width, const float* importance, Vec low, Vec high,
                 const Grid& grid) {
  Scale best{}, tried[kCandidates];
  Vec best_loss = splat(std::numeric_limits<float>::infinity()), sum[kCandidates];
  for (int64_t first = 0; first < grid.ratio_count; first += kCandidates) {
    const int count = static_cast<int>(std::min<int64_t>(kCandidates, grid.ratio_count - first));
    for (int i = 0; i < count; ++i) tried[i] = candidate(low, high, grid.ratios[first + i], grid);
    if (first == 0) best = tried[0];
    if (count == kCandidates)
      losses<kWeighted, kCandidates>(tile, width, importance, tried, grid, sum);
    else
      for (int i = 0; i < count; ++i)
        losses<kWeighted, 1>(tile, width, importance, tried + i, grid, sum + i);
    for (int i = 0; i < count; ++i) {
      best.step = sum[i] < best_loss ? tried[i].step : best.step;
      best.zero = sum[i] < best_loss ? tried[i].zero : best.zero;
      best_loss = least(sum[i], best_loss);
    }
  }
  return best;
}

Scale search(const Vec* tile, int64_t width, const float* importance, const Grid& grid) {
  Vec low{}, high{};
  for (int64_t c = 0; c < width; ++c) {
    low = least(low, tile[c]);
    high = most(high, tile[c]);
  }
  if (grid.ratio_count == 1) return candidate(low, high, grid.ratios[0], grid);
  return importance ? least_loss<true>(tile, width, importance, low, high, grid)
                    : least_loss<false>(tile, width, importance, low, high, grid);
}

// Columns of a wide row that are looked at together. The cut is fixed, and so is the order in which
// their losses are added: no result depends on the number of threads.
constexpr int64_t kChunk = 1 << 14;

// body(chunk, values, vectors) for all chunks of a row, kRows columns a vector, zeros behind the
// last.
template <typename Body>
void for_chunks(const Block& b, const float* row, const Body& body) {
  in_parallel(b.threads, (b.width + kChunk - 1) / kChunk, 4, [&](int64_t first, int64_t last) {
    std::vector<Vec> values(kChunk / kRows);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t start = chunk * kChunk, count = std::min(kChunk, b.width - start);
      const int64_t vectors = (count + kRows - 1) / kRows;
      values[vectors - 1] = Vec{};
      std::memcpy(values.data(), row + start, count * sizeof(float));
      body(chunk, values.data(), vectors);
    }
  });
}

// Losses of one chunk under every candidate; weighing: importance, kRows columns a vector, or null.
void chunk_losses(const Vec* values, int64_t vectors, const Vec* weighing,
                  const std::vector<Scale>& candidates, const Grid& grid, double* losses) {
  for (const Scale& s : candidates) {
    const Vec inverse = splat(1.0f) / s.step;
    const Vec least_code = splat(grid.code_min) - s.zero, most_code = splat(grid.code_max) - s.zero;
    Vec sum[2] = {};
    for (int64_t v = 0; v < vectors; ++v) {
      Vec code = nearest(least(most(values[v] * inverse, least_code), most_code));
      Vec error = values[v] - code * s.step;
      sum[v & 1] += weighing ? error * error * weighing[v] : error * error;
    }
    double total = 0;
    for (int i = 0; i < kRows; ++i) total += sum[0][i] + sum[1][i];
    *losses++ = total;
  }
}

// The search over one row that is far wider than a tile is high ("tensor" granularity).
Scale search_wide(const Block& b, const float* row, const Grid& grid) {
  const int64_t chunks = (b.width + kChunk - 1) / kChunk, ratios = grid.ratio_count;
  std::vector<Vec> low(chunks), high(chunks);
  for_chunks(b, row, [&](int64_t chunk, const Vec* values, int64_t vectors) {
    for (int64_t v = 0; v < vectors; ++v) {
      low[chunk] = least(low[chunk], values[v]);
      high[chunk] = most(high[chunk], values[v]);
    }
  });
  float lowest = 0, highest = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int i = 0; i < kRows; ++i) {
      lowest = std::min(lowest, low[chunk][i]);
      highest = std::max(highest, high[chunk][i]);
    }
  std::vector<Scale> candidates;
  for (int64_t i = 0; i < ratios; ++i)
    candidates.push_back(candidate(splat(lowest), splat(highest), grid.ratios[i], grid));
  if (ratios == 1) return candidates[0];
  std::vector<double> losses(chunks * ratios);
  for_chunks(b, row, [&](int64_t chunk, const Vec* values, int64_t vectors) {
    std::vector<Vec> weighing(b.importance ? vectors : 0);
    if (b.importance) {
      const int64_t start = chunk * kChunk, count = std::min(kChunk, b.width - start);
      std::memcpy(weighing.data(), b.importance + start, count * sizeof(float));
    }
    chunk_losses(values, vectors, b.importance ? weighing.data() : nullptr, candidates, grid,
                 losses.data() + chunk * ratios);
  });
  int64_t best = 0;
  double best_loss = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < ratios; ++i) {
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) total += losses[chunk * ratios + i];
    if (total < best_loss) best = i, best_loss = total;
  }
  return candidates[best];
}

Scale load_scale(const Block& b, int64_t row, int rows, int32_t group) {
  Scale s{splat(1.0f), splat(0.0f)};
  for (int r = 0; r < rows; ++r) {
    s.step[r] = b.scale[(row + r) * b.group_stride + group];
    if (b.zero) s.zero[r] = b.zero[(row + r) * b.group_stride + group];
  }
  return s;
}

void store_scale(const Block& b, int64_t row, int rows, int32_t group, const Scale& s) {
  for (int r = 0; r < rows; ++r) {
    b.scale[(row + r) * b.group_stride + group] = s.step[r];
    if (b.zero) b.zero[(row + r) * b.group_stride + group] = static_cast<int8_t>(s.zero[r]);
  }
}

// Fewer weights are not worth a thread.
template <typename Body>
void for_tiles(const Block& b, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, (1 << 13) / (kRows * b.width));
  in_parallel(b.threads, (b.rows + kRows - 1) / kRows, grain, body);
}

int64_t group_width(const Block& b, int64_t start) {
  int64_t stop = start;
  while (stop < b.width && b.groups[stop] == b.groups[start]) ++stop;
  return stop - start;
}

// kRows rows of a block: weights, what rounded columns pull at them, codes.
struct Tile {
  std::vector<Vec> weight, pull, code, updated, step;
  explicit Tile(int64_t width)
      : weight(width), pull(width), code(width), updated(width), step(width) {}
};

// Columns [first, last) that the loop settles before it updates all later ones at once: a later
// column is then read and written once for kPanel products.
constexpr int64_t kPanel = 8;

// target[j] += sum over i in [first, last) of factors[i] * r[i][j], for columns beyond the panel
// that starts at first.
void update_later(const float* r, int64_t stride, int64_t first, int64_t last, int64_t width,
                  const Vec* factors, Vec* target) {
  const int64_t beyond = first + kPanel;
  if (last - first == kPanel) {
    for (int64_t j = beyond; j < width; ++j) {
      Vec sum = target[j];
      for (int64_t i = 0; i < kPanel; ++i) sum += factors[first + i] * r[(first + i) * stride + j];
      target[j] = sum;
    }
    return;
  }
  for (int64_t j = beyond; j < width; ++j)
    for (int64_t i = first; i < last; ++i) target[j] += factors[i] * r[i * stride + j];
}

// Weights of columns [start, start + width) at their optimum: weight + pull R⁻¹.
void update_group(const Block& b, int64_t start, int64_t width, Tile& t) {
  const float* r = b.factor + start * b.width + start;
  const Vec* weight = t.weight.data() + start;
  Vec *pull = t.updated.data(), *x = t.step.data();
  std::copy_n(t.pull.data() + start, width, pull);
  for (int64_t first = 0; first < width; first += kPanel) {
    const int64_t last = std::min(first + kPanel, width);
    for (int64_t i = first; i < last; ++i) {
      x[i] = pull[i] * (1.0f / r[i * b.width + i]);
      for (int64_t j = i + 1; j < last; ++j) pull[j] -= x[i] * r[i * b.width + j];
      pull[i] = weight[i] + x[i];
      x[i] = -x[i];
    }
    update_later(r, b.width, first, last, width, x, pull);
  }
}

Scale group_start(const Block& b, const Grid& grid, int64_t row, int rows, int64_t i, Tile& t) {
  if (!b.search) return load_scale(b, row, rows, b.groups[i]);
  const int64_t width = group_width(b, i);
  update_group(b, i, width, t);
  Scale s = search(t.updated.data(), width, b.importance ? b.importance + i : nullptr, grid);
  store_scale(b, row, rows, b.groups[i], s);
  return s;
}

// Afterwards t.weight holds what was lost and t.pull the quantized weights.
void solve_tile(const Block& b, const Grid& grid, int64_t row, int rows, Tile& t) {
  const Vec code_min = splat(grid.code_min), code_max = splat(grid.code_max);
  int64_t first = 0;  // of the columns whose loss the later ones have yet to make up for
  Scale s{};
  for (int64_t i = 0; i < b.width; ++i) {
    const bool starts = i == 0 || b.groups[i] != b.groups[i - 1];
    if (i - first == kPanel || (starts && b.search)) {
      update_later(b.factor, b.width, first, i, b.width, t.weight.data(), t.pull.data());
      first = i;
    }
    if (starts) s = group_start(b, grid, row, rows, i, t);
    const float* r = b.factor + i * b.width;
    const Vec updated = t.weight[i] + t.pull[i] * (1.0f / r[i]);
    const Vec code = nearest(least(most(updated / s.step, code_min - s.zero), code_max - s.zero));
    const Vec lost = t.weight[i] - code * s.step;
    const int64_t last = std::min(first + kPanel, b.width);
    for (int64_t j = i + 1; j < last; ++j) t.pull[j] += lost * r[j];
    t.pull[i] = code * s.step;
    t.weight[i] = lost;
    t.code[i] = code + s.zero;
  }
}

}  // namespace

extern "C" {

void gptq_block(const Block* block, const Grid* grid) {
  const Block& b = *block;
  for_tiles(b, [&](int64_t first, int64_t last) {
    Tile t(b.width);
    for (int64_t row = first * kRows; row < std::min(b.rows, last * kRows); row += kRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kRows, b.rows - row));
      load_tile(b.weight + row * b.weight_stride, b.weight_stride, rows, b.width, t.weight.data());
      if (b.pulled)
        load_tile(b.quantized + row * b.out_stride, b.out_stride, rows, b.width, t.pull.data());
      else
        std::fill(t.pull.begin(), t.pull.end(), Vec{});
      solve_tile(b, *grid, row, rows, t);
      store_tile(t.pull.data(), b.out_stride, rows, b.width, b.quantized + row * b.out_stride);
      store_tile(t.code.data(), b.out_stride, rows, b.width, b.codes + row * b.out_stride);
      store_tile(t.weight.data(), b.width, rows, b.width, b.lost + row * b.width);
    }
  });
}

// One scale a row of weight [rows, width]; only the fields this needs are read.
void group_scale(const Block* block, const Grid* grid) {
  const Block& b = *block;
  if (b.rows < kRows && b.width >= kChunk) {
    for (int64_t row = 0; row < b.rows; ++row)
      store_scale(b, row, 1, 0, search_wide(b, b.weight + row * b.weight_stride, *grid));
    return;
  }
  for_tiles(b, [&](int64_t first, int64_t last) {
    std::vector<Vec> tile(b.width);
    for (int64_t row = first * kRows; row < std::min(b.rows, last * kRows); row += kRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kRows, b.rows - row));
      load_tile(b.weight + row * b.weight_stride, b.weight_stride, rows, b.width, tile.data());
      store_scale(b, row, rows, 0, search(tile.data(), b.width, b.importance, *grid));
    }
  });
}
}
