// Attention of a flat batch over keys and values in blocks.
//
// A token's heads are computed alone, in an order of sums that its own position alone decides, from
// keys and values as they are stored: neither neighbours, nor the number of tokens or threads, nor
// which blocks a text got can be seen in a result.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "stored.h"
#include "tile.h"

// Mirrored in cpu/attention.py.
struct Attention {
  const float* q;           // [rows, heads, dim]
  const void* keys;         // [blocks, kv_heads, block_size, dim] of `kind`
  const void* values;       // as keys
  const float* key_scales;  // [blocks, kv_heads, block_size] for int8, else null
  const float* value_scales;
  const int32_t* table;      // [sequences, table_stride]
  const int32_t* sequence;   // [rows]
  const int64_t* positions;  // [rows]
  float* out;                // as q
  int64_t rows, heads, kv_heads, dim, block_size, table_stride;
  int64_t window;  // 0 for none
  float scale, softcap;  // softcap 0 for none
  int32_t kind, threads;
};

namespace {

constexpr int kSlice = 4;  // vectors of a head that are summed at once
constexpr int kLanes = 4;  // sums side by side: one alone waits for itself
constexpr int64_t kGrain = 1 << 18;  // products worth a thread

// What a token sees of one head: 16 positions from `at` on, those beyond `count` left out.
template <typename T>
struct Seen {
  const T* rows[kRows];
  float scales[kRows];
  int count;
};

template <typename T>
Seen<T> look(const void* states, const float* scales, const Attention& a, const int32_t* blocks,
             int64_t head, int64_t at, int64_t end) {
  Seen<T> seen{};
  seen.count = static_cast<int>(std::min<int64_t>(kRows, end - at));
  int64_t index = at / a.block_size, offset = at % a.block_size;
  for (int i = 0; i < seen.count; ++i) {
    const int64_t row = (blocks[index] * a.kv_heads + head) * a.block_size + offset;
    seen.rows[i] = static_cast<const T*>(states) + row * a.dim;
    seen.scales[i] = scales ? scales[row] : 1.0f;
    if (++offset == a.block_size) offset = 0, ++index;
  }
  // In place of what is not seen, what is: it is read, and then weighs nothing.
  for (int i = seen.count; i < kRows; ++i) {
    seen.rows[i] = seen.rows[0];
    seen.scales[i] = seen.scales[0];
  }
  return seen;
}

template <typename T>
inline Vec load(const Seen<T>& seen, int i, int64_t from, int64_t dim) {
  const Vec found = load_stored(seen.rows[i] + from, dim - from);
  return sizeof(T) == 1 ? found * splat(seen.scales[i]) : found;
}

// Products of a query with 16 keys. q: padded with zeros to whole vectors.
template <typename T>
Vec scores(const Seen<T>& seen, const float* q, int64_t dim) {
  Vec parts[kRows] = {};
  for (int64_t c = 0; c < dim; c += kRows) {
    Vec part;
    std::memcpy(&part, q + c, sizeof(Vec));
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) parts[i] += load(seen, i, c, dim) * part;
  }
  transpose(parts);
  Vec sums[4];
  for (int i = 0; i < 4; ++i)
    sums[i] = (parts[i] + parts[i + 4]) + (parts[i + 8] + parts[i + 12]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Weights of `count` scores, up to their sum, which is returned; 0 behind them up to whole vectors.
float soften(float* s, int64_t count) {
  float top = s[0];
  for (int64_t i = 1; i < count; ++i) top = s[i] > top || std::isnan(s[i]) ? s[i] : top;
  Vec sums{};
  for (int64_t i = 0; i < count; i += kRows) {
    Vec x;
    std::memcpy(&x, s + i, sizeof(Vec));
    x = exponential(x - splat(top));
    for (int64_t k = count - i; k < kRows; ++k) x[k] = 0.0f;
    sums += x;
    std::memcpy(s + i, &x, sizeof(Vec));
  }
  float sum = 0.0f;
  for (int i = 0; i < kRows; ++i) sum += sums[i];
  return sum;
}

// A slice of kWide vectors of the weighted sum of values, written to `out` where a head has it.
template <typename T, int kWide>
void weigh(const Attention& a, const int32_t* blocks, int64_t head, int64_t first, int64_t end,
           int64_t from, const float* weights, float sum, float* out) {
  Vec acc[kLanes][kWide] = {};
  for (int64_t at = first; at < end; at += kRows) {
    const Seen<T> seen = look<T>(a.values, a.value_scales, a, blocks, head, at, end);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int c = 0; c < kWide; ++c)
        acc[i % kLanes][c] += load(seen, i, from + c * kRows, a.dim) * splat(weights[at - first + i]);
  }
  for (int c = 0; c < kWide; ++c) {
    const Vec total = ((acc[0][c] + acc[1][c]) + (acc[2][c] + acc[3][c])) / splat(sum);
    const int64_t left = std::min<int64_t>(kRows, a.dim - from - c * kRows);
    std::memcpy(out + from + c * kRows, &total, left * sizeof(float));
  }
}

template <typename T>
void weigh_all(const Attention& a, const int32_t* blocks, int64_t head, int64_t first, int64_t end,
               const float* weights, float sum, float* out) {
  int64_t from = 0;
  for (; a.dim - from > (kSlice - 1) * kRows; from += kSlice * kRows)
    weigh<T, kSlice>(a, blocks, head, first, end, from, weights, sum, out);
  for (; from < a.dim; from += kRows)
    weigh<T, 1>(a, blocks, head, first, end, from, weights, sum, out);
}

int64_t first_seen(const Attention& a, int64_t row) {
  return a.window ? std::max<int64_t>(0, a.positions[row] - a.window + 1) : 0;
}

// All query heads of a token that read one head of keys and values.
template <typename T>
void attend(const Attention& a, int64_t row, int64_t head, std::vector<float>& memory) {
  const int64_t group = a.heads / a.kv_heads, first = first_seen(a, row);
  const int64_t end = a.positions[row] + 1, wide = (a.dim + kRows - 1) / kRows * kRows;
  const int64_t width = (end - first + kRows - 1) / kRows * kRows;
  const int32_t* blocks = a.table + a.sequence[row] * a.table_stride;
  const int64_t offset = (row * a.heads + head * group) * a.dim;
  memory.assign(group * (wide + width), 0.0f);
  float* q = memory.data();
  float* weights = q + group * wide;
  for (int64_t g = 0; g < group; ++g)
    std::memcpy(q + g * wide, a.q + offset + g * a.dim, a.dim * sizeof(float));
  for (int64_t at = first; at < end; at += kRows) {
    const Seen<T> seen = look<T>(a.keys, a.key_scales, a, blocks, head, at, end);
    for (int64_t g = 0; g < group; ++g) {
      Vec s = scores(seen, q + g * wide, a.dim) * splat(a.scale);
      if (a.softcap != 0.0f)
        for (int i = 0; i < kRows; ++i) s[i] = std::tanh(s[i] / a.softcap) * a.softcap;
      std::memcpy(weights + g * width + at - first, &s, sizeof(Vec));
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    const float sum = soften(weights + g * width, end - first);
    weigh_all<T>(a, blocks, head, first, end, weights + g * width, sum, a.out + offset + g * a.dim);
  }
}

template <typename T>
void attend_all(const Attention& a) {
  // Split by products, not by tokens: those at the end of a text cost most.
  const int64_t width = a.heads / a.kv_heads * a.dim;
  std::vector<int64_t> begin(a.rows + 1, 0);
  for (int64_t row = 0; row < a.rows; ++row)
    begin[row + 1] = begin[row] + a.kv_heads * width * (a.positions[row] + 1 - first_seen(a, row));
  in_parallel(a.threads, begin[a.rows], kGrain, [&](int64_t from, int64_t to) {
    std::vector<float> memory;
    for (int64_t row = 0; row < a.rows; ++row) {
      const int64_t each = (begin[row + 1] - begin[row]) / a.kv_heads;
      for (int64_t head = 0; head < a.kv_heads; ++head) {
        const int64_t at = begin[row] + head * each;
        if (from <= at && at < to) attend<T>(a, row, head, memory);
      }
    }
  });
}

}  // namespace

extern "C" void paged_attention(const Attention* a) {
  switch (a->kind) {
    case kFloat32: return attend_all<float>(*a);
    case kBFloat16: return attend_all<BFloat16>(*a);
    case kFloat16: return attend_all<Float16>(*a);
    default: return attend_all<int8_t>(*a);
  }
}
