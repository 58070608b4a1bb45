// Attention of a flat batch over keys and values in blocks.
//
// Rows of a text go in tiles over runs of kRun positions, which begin at its multiples: scores of a
// run, then weights under the run's own maximum, then values. Runs are merged in their order. So a
// row's sums have an order that its own position alone decides: neither neighbours, nor the number
// of tokens or threads, nor which blocks a text got can be seen in a result.

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "attention_tiles.h"
#include "attention_worker.h"
#include "parallel.h"
#include "softmax.h"

namespace paged {

constexpr int64_t kAhead = 8192;  // bytes that are asked for before they are read
constexpr int kWidened = 16;      // rows from which on keys and values are widened for all of them

// Rows of a run as fp32, padded with zeros to whole vectors: read by many, they are widened once.
template <typename T>
HeadRows widened(const HeadRows& rows, Span seen, float* to, const int64_t* at, int64_t wide,
                 const char* const* soon) {
  for (int p = seen.from; p < seen.to; ++p) {
    ask(soon + p, 1, rows.dim * sizeof(T));
    const T* from = row_of<T>(rows, p);
    for (int64_t c = 0; c < rows.dim; c += kRows) {
      const Vec x = load_stored(from + c, rows.dim - c);
      std::memcpy(to + p * wide + c, &x, sizeof x);
    }
  }
  return {reinterpret_cast<const char*>(to), at, wide};
}

// Scores of all rows with the keys of a run, as products.
template <typename T>
void score(const HeadRows& keys, const Plan& plan, Worker& w, int rows, Span seen,
           const Coming& coming) {
  const auto tile = [&](auto height, int row, int p) {
    constexpr int kHeight = decltype(height)::value;
    Span own{kRun, 0};  // what one of them sees
    for (int i = row; i < row + kHeight; ++i)
      if (w.spans[i].to)
        own = {std::min(own.from, w.spans[i].from), std::max(own.to, w.spans[i].to)};
    if (own.from < p + kRows && p < own.to)
      dots_of_step<T, kHeight>(keys, w.q + row * plan.wide, plan.wide, p, own,
                               w.weights + row * kRun, row ? Coming{} : coming);
  };
  for (int p = seen.from / kRows * kRows; p < seen.to; p += kRows) {
    int row = 0;
    for (; rows - row >= kHigh; row += kHigh) tile(std::integral_constant<int, kHigh>(), row, p);
    if (rows - row >= 2) tile(std::integral_constant<int, 2>(), row, p), row += 2;
    if (row < rows) tile(std::integral_constant<int, 1>(), row, p);
  }
}

// kSlice: vectors of a head that are summed at once.
template <typename T, int kSlice>
void weigh_in(const HeadRows& values, const Plan& plan, Worker& w, int rows,
              const char* const* soon) {
  int64_t c = 0;
  const auto slices = [&](auto wide) {
    constexpr int kWide = decltype(wide)::value;
    for (; values.dim - c >= kWide * kRows; c += kWide * kRows)
      weigh_slice<T, kWide, true>(values, c, w.weights, w.spans.data(), rows, w.out + c,
                                  plan.wide_value, soon);
  };
  slices(std::integral_constant<int, kSlice>());
  if constexpr (kSlice > 4) slices(std::integral_constant<int, 4>());
  if constexpr (kSlice > 2) slices(std::integral_constant<int, 2>());
  slices(std::integral_constant<int, 1>());
  if (values.dim > c)
    weigh_slice<T, 1, false>(values, c, w.weights, w.spans.data(), rows, w.out + c,
                             plan.wide_value, soon);
}

template <typename T>
void weigh(const HeadRows& values, const Plan& plan, Worker& w, int rows, const char* const* soon) {
  if (rows == 1) weigh_in<T, 8>(values, plan, w, rows, soon);
  else if (rows < kTallRows) weigh_in<T, 4>(values, plan, w, rows, soon);
  else weigh_in<T, 2>(values, plan, w, rows, soon);
}

// One head of keys and values in one run, for all rows of a tile: w.runs and w.out. Behind it comes
// `later` of `later_head`, -1 for nothing.
template <typename T>
bool attend_run(const Attention& a, const Plan& plan, const Tile& tile, int64_t head, int64_t run,
                int64_t later_head, int64_t later, Worker& w) {
  const Sizes sizes = sizes_of(a, sizeof(T));
  Places& places = w.places[run & 1];
  place(a, plan, tile, run, sizes, places);
  const Span seen = places.seen;
  if (seen.from >= seen.to) return false;
  const int rows = static_cast<int>(tile.count * plan.group);
  for (int row = 0; row < rows; ++row)
    w.spans[row] = span_in(a, plan.order[tile.first + row / plan.group], run);
  const bool shared = a.keys == a.values;
  const char* first_key = static_cast<const char*>(a.keys);
  const char* first_value = static_cast<const char*>(a.values);
  HeadRows keys{first_key + head * sizes.key_head, places.keys, a.dim};
  HeadRows values{first_value + head * sizes.value_head, places.values, a.value_dim};
  Pass after{};  // what is read behind the last pass
  if (later >= 0) {
    Places& behind = w.places[later & 1];
    if (&behind != &places || later == run) {
      place(a, plan, tile, later, sizes, behind);
      after = {first_key + later_head * sizes.key_head, behind.keys, behind.seen};
    }
  }
  const int ahead = static_cast<int>(std::max<int64_t>(1, kAhead / sizes.key));
  const Pass over_keys{keys.first, keys.at, seen}, over_values{values.first, values.at, seen};
  const bool widen = rows >= kWidened && (sizeof(T) != sizeof(float) || a.dim % kRows);
  // One row goes over values in their order; many do not, and then they are here before.
  const bool alone = rows == 1 && !shared, beside = !alone && !shared && !widen;
  look_ahead(over_keys, shared || beside ? after : over_values, ahead, w.soon_keys);
  if (!shared) look_ahead(over_values, after, beside ? 0 : ahead, w.soon_values);
  // Products with values take long there: meanwhile come the next keys.
  if (!alone) look_ahead(over_values, after, kRun, w.soon_after);
  if (widen) {
    keys = widened<T>(keys, seen, w.wide_keys, w.packed_keys, plan.wide, w.soon_keys);
    score<float>(keys, plan, w, rows, seen, {});
  } else {
    const char* const* values_soon = beside ? w.soon_values : nullptr;
    score<T>(keys, plan, w, rows, seen,
             {w.soon_keys, values_soon, sizes.key, a.value_dim * sizes.number});
  }
  const float *key_scales = nullptr, *value_scales = nullptr;
  if (a.key_scales) {
    scales_of(a, places, head, a.key_scales, w.key_scales);
    if (a.value_scales != a.key_scales)
      scales_of(a, places, head, a.value_scales, w.value_scales);
    key_scales = w.key_scales;
    value_scales = a.value_scales != a.key_scales ? w.value_scales : w.key_scales;
  }
  for (int row = 0; row < rows; ++row)
    if (w.spans[row].to)
      w.runs[row] = soften(w.weights + row * kRun, w.spans[row].from, w.spans[row].to, a.scale,
                           a.softcap, key_scales, value_scales);
  if (widen && shared) {
    weigh<float>({keys.first, keys.at, plan.wide_value}, plan, w, rows, nullptr);
  } else if (widen) {
    values = widened<T>(values, seen, w.wide_values, w.packed_values, plan.wide_value,
                        w.soon_values);
    weigh<float>(values, plan, w, rows, nullptr);
  } else {
    weigh<T>(values, plan, w, rows, alone ? w.soon_values : w.soon_after);
  }
  return true;
}

template <typename T>
void load_queries_of(const Attention& a, const Plan& plan, const Tile& tile, int64_t head,
                     float* q) {
  for (int64_t i = 0; i < tile.count; ++i)
    for (int64_t g = 0; g < plan.group; ++g, q += plan.wide) {
      const int64_t row = plan.order[tile.first + i] * a.heads + head * plan.group + g;
      const T* from = static_cast<const T*>(a.q) + row * a.dim;
      for (int64_t c = 0; c < plan.wide; c += kRows)
        store_stored(load_stored(from + c, a.dim - c), q + c, kRows);
    }
}

void load_queries(const Attention& a, const Plan& plan, const Tile& tile, int64_t head, float* q) {
  if (a.outer_kind == kFloat32) load_queries_of<float>(a, plan, tile, head, q);
  else if (a.outer_kind == kBFloat16) load_queries_of<BFloat16>(a, plan, tile, head, q);
  else load_queries_of<Float16>(a, plan, tile, head, q);
}

// total: whole vectors.
template <typename T>
void finish_as(const Attention& a, const RunSum& sum, const float* total, int64_t row) {
  T* out = static_cast<T*>(a.out) + row * a.value_dim;
  for (int64_t c = 0; c < a.value_dim; c += kRows)
    store_stored(load_stored(total + c, kRows) / sum.weights, out + c, a.value_dim - c);
}

void finish(const Attention& a, const RunSum& sum, const float* total, int64_t token,
            int64_t head) {
  const int64_t row = token * a.heads + head;
  if (a.outer_kind == kFloat32) finish_as<float>(a, sum, total, row);
  else if (a.outer_kind == kBFloat16) finish_as<BFloat16>(a, sum, total, row);
  else finish_as<Float16>(a, sum, total, row);
}

constexpr RunSum kNothing{-__builtin_inff(), 0.0f};

// All runs of heads [first, end), merged as they come.
template <typename T>
void attend_whole(const Attention& a, const Plan& plan, const Tile& tile, int64_t first,
                  int64_t end, Worker& w) {
  const int64_t rows = tile.count * plan.group, wide = plan.wide_value, all = rows * (end - first);
  for (int64_t head = first; head < end; ++head)
    load_queries(a, plan, tile, head, w.queries + (head - first) * rows * plan.wide);
  std::fill_n(w.sums.begin(), all, kNothing);
  std::fill(w.total, w.total + all * wide, 0.0f);
  for (int64_t run = tile.low; run < tile.high; ++run)
    for (int64_t head = first; head < end; ++head) {
      const bool last = head + 1 == end;
      const int64_t next = last ? run + 1 : run, then = next < tile.high ? next : -1;
      const int64_t at = (head - first) * rows;
      w.q = w.queries + at * plan.wide;
      if (!attend_run<T>(a, plan, tile, head, run, last ? first : head + 1, then, w)) continue;
      for (int64_t row = 0; row < rows; ++row)
        if (w.spans[row].to)
          merge(w.sums[at + row], w.total + (at + row) * wide, w.runs[row], w.out + row * wide,
                wide);
    }
  for (int64_t row = 0; row < all; ++row)
    finish(a, w.sums[row], w.total + row * wide, plan.order[tile.first + row % rows / plan.group],
           (first + row / rows) * plan.group + row % plan.group);
}

// Sums of runs that are merged when all are there. Of a tile: [runs, kv_heads, rows]. Nothing is
// written first: only what a row sees is read, and that was written.
struct Apart {
  std::unique_ptr<RunSum[]> runs;
  std::unique_ptr<float[]> values;  // [runs, wide_value]
};

int64_t slot_of(const Attention& a, const Plan& plan, const Tile& tile, int64_t run, int64_t head) {
  return tile.slot + ((run - tile.low) * a.kv_heads + head) * tile.count * plan.group;
}

template <typename T>
void attend_apart(const Attention& a, const Plan& plan, const Tile& tile, int64_t number,
                  Apart& apart, Worker& w) {
  const int64_t run = tile.low + number / a.kv_heads, head = number % a.kv_heads;
  const bool last = head + 1 == a.kv_heads;
  load_queries(a, plan, tile, head, w.queries);
  w.q = w.queries;
  const int64_t next = last ? run + 1 : run, then = next < tile.high ? next : -1;
  if (!attend_run<T>(a, plan, tile, head, run, last ? 0 : head + 1, then, w)) return;
  const int64_t slot = slot_of(a, plan, tile, run, head), rows = tile.count * plan.group;
  std::copy_n(w.runs.begin(), rows, apart.runs.get() + slot);
  std::copy_n(w.out, rows * plan.wide_value, apart.values.get() + slot * plan.wide_value);
}

void merge_apart(const Attention& a, const Plan& plan, const Tile& tile, const Apart& apart,
                 std::vector<float>& total) {
  const int64_t wide = plan.wide_value;
  for (int64_t head = 0; head < a.kv_heads; ++head)
    for (int64_t row = 0; row < tile.count * plan.group; ++row) {
      const int64_t token = plan.order[tile.first + row / plan.group];
      RunSum sum = kNothing;
      total.assign(wide, 0.0f);
      for (int64_t run = tile.low; run < tile.high; ++run) {
        if (!span_in(a, token, run).to) continue;
        const int64_t slot = slot_of(a, plan, tile, run, head) + row;
        merge(sum, total.data(), apart.runs[slot], apart.values.get() + slot * wide, wide);
      }
      finish(a, sum, total.data(), token, head * plan.group + row % plan.group);
    }
}

// Of this thread. Not inside a template: such a variable is one for all libraries of a process.
static Worker& worker() {
  static thread_local Worker w;
  return w;
}

template <typename T>
void attend_all(const Attention& a) {
  if (!a.rows) return;
  const Plan plan = plan_of(a);
  const int64_t tiles = static_cast<int64_t>(plan.tiles.size()) - 1;
  Apart apart;
  if (plan.split) {
    apart.runs.reset(new RunSum[plan.tiles[tiles].slot]);
    apart.values.reset(new float[plan.tiles[tiles].slot * plan.wide_value]);
  }
  // Split by products, not by tokens: those at the end of a text cost most.
  in_parallel(a.threads, plan.tiles[tiles].cost, kGrain, [&](int64_t from, int64_t to) {
    Worker& w = worker();
    w.open(plan, std::max(plan.group, kTall), a.kv_heads);
    for (int64_t i = 0; i < tiles && plan.tiles[i].cost < to; ++i) {
      const Tile& tile = plan.tiles[i];
      const int64_t cost = plan.tiles[i + 1].cost - tile.cost;
      const int64_t pieces = plan.split ? (tile.high - tile.low) * a.kv_heads : a.kv_heads;
      // Of each tile the pieces whose share of the products begins in [from, to).
      const auto piece = [&](int64_t at) {
        if (at <= tile.cost) return int64_t{0};
        return std::min(pieces, ((at - tile.cost) * pieces + cost - 1) / cost);
      };
      const int64_t end = piece(to);
      // Few rows go over a run head by head, as its blocks have the heads side by side.
      const int64_t each = tile.count * plan.group > kFew ? 1 : pieces;
      for (int64_t number = piece(from); number < end;)
        if (plan.split) attend_apart<T>(a, plan, tile, number++, apart, w);
        else {
          const int64_t until = std::min(end, number + each);
          attend_whole<T>(a, plan, tile, number, until, w);
          number = until;
        }
    }
  });
  if (!plan.split) return;
  std::vector<float> total;
  for (int64_t i = 0; i < tiles; ++i) merge_apart(a, plan, plan.tiles[i], apart, total);
}

}  // namespace paged

extern "C" void paged_attention(const paged::Attention* a) {
  using paged::attend_all;
  switch (a->kind) {
    case kFloat32: return attend_all<float>(*a);
    case kBFloat16: return attend_all<BFloat16>(*a);
    case kFloat16: return attend_all<Float16>(*a);
    default: return attend_all<int8_t>(*a);
  }
}
