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
  const void* values;       // [blocks, kv_heads, block_size, value_dim] of `kind`; value_stride
                            // from one position to the next, more where they lie in the keys
  const Float16* key_scales;  // [blocks, kv_heads, block_size] for int8, else null
  const Float16* value_scales;
  const int32_t* table;      // [sequences, table_stride]
  const int32_t* sequence;   // [rows]
  const int64_t* positions;  // [rows]
  float* out;                // [rows, heads, value_dim]
  int64_t rows, heads, kv_heads, dim, value_dim, value_stride, block_size, table_stride;
  int64_t window;  // 0 for none
  float scale, softcap;  // softcap 0 for none
  int32_t kind, threads;
};

namespace {

constexpr int kSlice = 4;  // vectors of a head that are summed at once
constexpr int kLanes = 4;  // sums side by side: one alone waits for itself
constexpr int64_t kAhead = 4096;  // bytes
constexpr int64_t kGrain = 1 << 17;  // products with keys and with values that are worth a thread

// What a token sees of one head: kRows positions from `at` on, those beyond `count` left out.
template <typename T>
struct Seen {
  const T* rows[kRows];
  float scales[kRows];
  int count;
};

// Keys or values of a layer, `dim` numbers of each head and position, `stride` from one to the next.
struct States {
  const void* data;
  const Float16* scales;  // null where there are none
  int64_t dim, stride;
};

// What is read next is asked for ahead: blocks lie anywhere, where a processor does not look by
// itself. `head` counts on from `at`: behind the last one come those of the next kRows positions.
// Inlined by force: GCC before 14 leaves out calls of functions that only prefetch.
template <typename T>
__attribute__((always_inline)) inline void fetch(const States& states, const Attention& a,
                                                 const int32_t* blocks, int64_t from, int64_t to,
                                                 int64_t head, int64_t at, int64_t end) {
  const int64_t bytes = kRows * states.stride * sizeof(T),
                ahead = std::max<int64_t>(1, kAhead / bytes);
  const int64_t place = head - from + ahead;
  at += place / (to - from) * kRows;
  if (at >= end) return;
  const int64_t row = (blocks[at / a.block_size] * a.kv_heads + from + place % (to - from)) *
                          a.block_size + at % a.block_size;
  const char* first = static_cast<const char*>(states.data) + row * states.stride * sizeof(T);
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(first + line);
}

template <typename T>
Seen<T> look(const States& states, const Attention& a, const int32_t* blocks, int64_t head,
             int64_t at, int64_t end) {
  Seen<T> seen{};
  seen.count = static_cast<int>(std::min<int64_t>(kRows, end - at));
  int64_t index = at / a.block_size, offset = at % a.block_size;
  for (int i = 0; i < seen.count; ++i) {
    const int64_t row = (blocks[index] * a.kv_heads + head) * a.block_size + offset;
    seen.rows[i] = static_cast<const T*>(states.data) + row * states.stride;
    seen.scales[i] = states.scales ? load_stored(states.scales + row, 1)[0] : 1.0f;
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

// Products of a query with kRows keys. q: padded with zeros to whole vectors.
template <typename T>
Vec scores(const Seen<T>& seen, const float* q, int64_t dim) {
  Vec parts[kRows] = {};
  for (int64_t c = 0; c < dim; c += kRows) {
    Vec part;
    std::memcpy(&part, q + c, sizeof(Vec));
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) parts[i] += load(seen, i, c, dim) * part;
  }
  return totals(parts);
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

// Adds kRows values times their weights to kWide vectors of a head's sum.
template <typename T, int kWide>
void weigh(const Seen<T>& seen, const float* weights, int64_t from, int64_t dim, float* total) {
  Vec parts[kLanes][kWide] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < kWide; ++c)
      parts[i % kLanes][c] += load(seen, i, from + c * kRows, dim) * splat(weights[i]);
  for (int c = 0; c < kWide; ++c) {
    Vec sum;
    std::memcpy(&sum, total + from + c * kRows, sizeof(Vec));
    sum += (parts[0][c] + parts[1][c]) + (parts[2][c] + parts[3][c]);
    std::memcpy(total + from + c * kRows, &sum, sizeof(Vec));
  }
}

template <typename T>
void weigh_all(const Seen<T>& seen, const float* weights, int64_t dim, float* total) {
  int64_t from = 0;
  for (; dim - from > (kSlice - 1) * kRows; from += kSlice * kRows)
    weigh<T, kSlice>(seen, weights, from, dim, total);
  for (; from < dim; from += kRows) weigh<T, 1>(seen, weights, from, dim, total);
}

int64_t first_seen(const Attention& a, int64_t row) {
  return a.window ? std::max<int64_t>(0, a.positions[row] - a.window + 1) : 0;
}

// Heads [from, to) of keys and values that a token reads, and the query heads that read them.
// Heads of a block lie together, so they are gone through inside.
template <typename T>
void attend(const Attention& a, int64_t row, int64_t from, int64_t to, std::vector<float>& memory) {
  const int64_t group = a.heads / a.kv_heads, count = (to - from) * group;
  const int64_t first = first_seen(a, row), end = a.positions[row] + 1;
  const States keys{a.keys, a.key_scales, a.dim, a.dim};
  const States values{a.values, a.value_scales, a.value_dim, a.value_stride};
  const int64_t wide = (a.dim + kRows - 1) / kRows * kRows;
  const int64_t wide_value = (a.value_dim + kRows - 1) / kRows * kRows;
  const int64_t width = (end - first + kRows - 1) / kRows * kRows;
  const int32_t* blocks = a.table + a.sequence[row] * a.table_stride;
  const int64_t first_head = row * a.heads + from * group;
  memory.assign(count * (wide + wide_value + width + 1), 0.0f);
  float *q = memory.data(), *total = q + count * wide, *weights = total + count * wide_value;
  float* sums = weights + count * width;
  for (int64_t h = 0; h < count; ++h)
    std::memcpy(q + h * wide, a.q + (first_head + h) * a.dim, a.dim * sizeof(float));
  for (int64_t at = first; at < end; at += kRows)
    for (int64_t h = 0; h < count; h += group) {
      fetch<T>(keys, a, blocks, from, to, from + h / group, at, end);
      const Seen<T> seen = look<T>(keys, a, blocks, from + h / group, at, end);
      for (int64_t g = h; g < h + group; ++g) {
        Vec s = scores(seen, q + g * wide, a.dim) * splat(a.scale);
        if (a.softcap != 0.0f)
          for (int i = 0; i < kRows; ++i) s[i] = std::tanh(s[i] / a.softcap) * a.softcap;
        std::memcpy(weights + g * width + at - first, &s, sizeof(Vec));
      }
    }
  for (int64_t h = 0; h < count; ++h) sums[h] = soften(weights + h * width, end - first);
  for (int64_t at = first; at < end; at += kRows)
    for (int64_t h = 0; h < count; h += group) {
      fetch<T>(values, a, blocks, from, to, from + h / group, at, end);
      const Seen<T> seen = look<T>(values, a, blocks, from + h / group, at, end);
      for (int64_t g = h; g < h + group; ++g)
        weigh_all(seen, weights + g * width + at - first, a.value_dim, total + g * wide_value);
    }
  for (int64_t h = 0; h < count; ++h)
    for (int64_t c = 0; c < a.value_dim; ++c)
      a.out[(first_head + h) * a.value_dim + c] = total[h * wide_value + c] / sums[h];
}

template <typename T>
void attend_all(const Attention& a) {
  // Split by products, not by tokens: those at the end of a text cost most.
  std::vector<int64_t> begin(a.rows + 1, 0);
  for (int64_t row = 0; row < a.rows; ++row)
    begin[row + 1] = begin[row] + a.heads * (a.dim + a.value_dim) *
                                      (a.positions[row] + 1 - first_seen(a, row));
  in_parallel(a.threads, begin[a.rows], kGrain, [&](int64_t from, int64_t to) {
    std::vector<float> memory;
    // Of each token the heads whose share of the products begins in [from, to).
    for (int64_t row = 0; row < a.rows; ++row) {
      const int64_t each = (begin[row + 1] - begin[row]) / a.kv_heads;
      const auto head = [&](int64_t at) {
        return std::clamp<int64_t>((at - begin[row] + each - 1) / each, 0, a.kv_heads);
      };
      if (begin[row] < to && head(from) < head(to)) attend<T>(a, row, head(from), head(to), memory);
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
