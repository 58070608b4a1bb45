// What attention over blocks is given, how its work is cut, and where a run's keys and values lie.

#pragma once

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "attention_tiles.h"

namespace paged {

// Mirrored in cpu/attention.py.
struct Attention {
  const void* q;            // [rows, heads, dim] of `outer_kind`
  const void* keys;         // [blocks, kv_heads, block_size, dim] of `kind`
  const void* values;       // [blocks, kv_heads, block_size, value_dim] of `kind`; value_stride
                            // from one position to the next, more where they lie in the keys
  const Float16* key_scales;  // [blocks, kv_heads, block_size] for int8, else null
  const Float16* value_scales;
  const int32_t* table;      // [sequences, table_stride]
  const int32_t* sequence;   // [rows]
  const int64_t* positions;  // [rows]
  void* out;                 // [rows, heads, value_dim] of `outer_kind`
  int64_t rows, heads, kv_heads, dim, value_dim, value_stride, block_size, table_stride;
  int64_t window;  // 0 for none
  float scale, softcap;  // softcap 0 for none
  int32_t kind, outer_kind, threads;
};

constexpr int64_t kTall = 64;        // query rows that go over a run together, at most
constexpr int64_t kFew = 16;         // rows of as many that go over a run head by head, at most
constexpr int64_t kGrain = 1 << 16;  // products with keys and with values that are worth a thread
constexpr int64_t kUnits = 4;        // pieces of work a thread that leave none without
constexpr int64_t kApart = 16 << 20;  // numbers of runs that are not merged at once, at most

inline int64_t whole_vectors(int64_t width) { return (width + kRows - 1) / kRows * kRows; }

// Tokens of one text: `count` of the order from `first` on; none sees a run outside [low, high).
struct Tile {
  int64_t first, count, low, high;
  int64_t cost;  // products of all tiles before
  int64_t slot;  // sums of runs of all tiles before
};

struct Plan {
  std::vector<int64_t> order;  // tokens, by text and position
  std::vector<Tile> tiles;     // and one behind the last
  bool split;                  // whether a run is a piece of work, and not a text
  int64_t group, wide, wide_value;
};

inline int64_t first_seen(const Attention& a, int64_t row) {
  return a.window ? std::max<int64_t>(0, a.positions[row] - a.window + 1) : 0;
}

inline Span span_in(const Attention& a, int64_t row, int64_t run) {
  const int64_t from = std::max<int64_t>(first_seen(a, row) - run * kRun, 0);
  const int64_t to = std::min<int64_t>(a.positions[row] + 1 - run * kRun, kRun);
  return from < to ? Span{static_cast<int>(from), static_cast<int>(to)} : Span{0, 0};
}

inline Plan plan_of(const Attention& a) {
  Plan plan;
  plan.group = a.heads / a.kv_heads;
  plan.wide = whole_vectors(a.dim), plan.wide_value = whole_vectors(a.value_dim);
  plan.order.resize(a.rows);
  std::iota(plan.order.begin(), plan.order.end(), 0);
  std::stable_sort(plan.order.begin(), plan.order.end(), [&](int64_t x, int64_t y) {
    return a.sequence[x] != a.sequence[y] ? a.sequence[x] < a.sequence[y]
                                          : a.positions[x] < a.positions[y];
  });
  const int64_t most = std::max<int64_t>(1, kTall / plan.group);
  int64_t cost = 0, slot = 0;
  for (int64_t first = 0; first < a.rows;) {
    Tile tile{first, 0, INT64_MAX, 0, cost, slot};
    const int32_t text = a.sequence[plan.order[first]];
    for (; first < a.rows && tile.count < most; ++first, ++tile.count) {
      const int64_t row = plan.order[first];
      if (a.sequence[row] != text) break;
      tile.low = std::min(tile.low, first_seen(a, row) / kRun);
      tile.high = std::max(tile.high, a.positions[row] / kRun + 1);
      cost += a.heads * (a.dim + a.value_dim) * (a.positions[row] + 1 - first_seen(a, row));
    }
    slot += (tile.high - tile.low) * a.heads * tile.count;
    plan.tiles.push_back(tile);
  }
  const int64_t units = static_cast<int64_t>(plan.tiles.size()) * a.kv_heads;
  plan.split = a.threads > 1 && units < kUnits * a.threads && slot * plan.wide_value <= kApart;
  plan.tiles.push_back({a.rows, 0, 0, 0, cost, slot});
  return plan;
}

// Where rows of keys and of values of one run lie, from the first of their head on. What no token
// of the tile sees lies where the nearest does that one sees: it is read, and then left.
struct Places {
  struct Part {  // of one block
    int from, count;
    int64_t row;
  };
  const Tile* tile = nullptr;
  int64_t run = 0;
  Span seen;
  int parts;
  Part part[kRun];
  int64_t keys[kRun], values[kRun];
};

struct Sizes {
  int64_t number, key, value, key_head, value_head;  // bytes: of a row, and of a head of a block
};

inline Sizes sizes_of(const Attention& a, int64_t number) {
  const int64_t key = a.dim * number, value = a.value_stride * number;
  return {number, key, value, key * a.block_size, value * a.block_size};
}

inline void place(const Attention& a, const Plan& plan, const Tile& tile, int64_t run,
                  const Sizes& sizes, Places& places) {
  if (places.tile == &tile && places.run == run) return;
  Span seen{kRun, 0};
  for (int64_t i = 0; i < tile.count; ++i) {
    const Span span = span_in(a, plan.order[tile.first + i], run);
    if (span.from < span.to)
      seen = {std::min(seen.from, span.from), std::max(seen.to, span.to)};
  }
  places.tile = &tile, places.run = run, places.seen = seen, places.parts = 0;
  const int32_t* blocks = a.table + a.sequence[plan.order[tile.first]] * a.table_stride;
  for (int p = seen.from; p < seen.to;) {
    const int64_t at = run * kRun + p, offset = at % a.block_size;
    const int64_t row = blocks[at / a.block_size] * a.kv_heads * a.block_size + offset;
    const int end = static_cast<int>(std::min<int64_t>(seen.to, p + a.block_size - offset));
    places.part[places.parts++] = {p, end - p, row};
    for (int i = p; i < end; ++i) {
      places.keys[i] = (row + i - p) * sizes.key;
      places.values[i] = (row + i - p) * sizes.value;
    }
    p = end;
  }
  if (seen.from >= seen.to) return;
  for (int64_t* at : {places.keys, places.values}) {
    std::fill(at, at + seen.from, at[seen.from]);
    std::fill(at + seen.to, at + kRun, at[seen.to - 1]);
  }
}

// Scales of a head in a run, as fp32.
inline void scales_of(const Attention& a, const Places& places, int64_t head,
                      const Float16* scales, float* found) {
  Float16 half[kRun] = {};
  scales += head * a.block_size;
  for (int i = 0; i < places.parts; ++i) {
    const Places::Part& part = places.part[i];
    // A block of 16 is a copy of one register, others a call.
    if (part.count == 16) std::memcpy(half + part.from, scales + part.row, 16 * sizeof(Float16));
    else std::memcpy(half + part.from, scales + part.row, part.count * sizeof(Float16));
  }
  for (int p = 0; p < kRun; p += kRows) {
    const Vec x = load_stored(half + p, kRows);
    std::memcpy(found + p, &x, sizeof x);
  }
}

}  // namespace paged
