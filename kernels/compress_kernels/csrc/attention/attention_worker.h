// The memory of one thread of attention.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_plan.h"
#include "softmax.h"

namespace paged {

// What a thread works with; kept, as a call may be short.
struct Worker {
  std::vector<float> memory;
  Places places[2];                     // of runs with an even and with an odd number
  int64_t packed_keys[kRun], packed_values[kRun];
  float key_scales[kRun], value_scales[kRun];
  // Asked for beside keys, beside values, and beside values that many rows go over.
  const char *soon_keys[kRun], *soon_values[kRun], *soon_after[kRun];
  std::vector<Span> spans;              // of rows, as `runs`
  std::vector<RunSum> runs, sums;       // `sums` of all heads at once, as `queries` and `total`
  float *queries, *weights, *out, *total, *wide_keys, *wide_values;  // in `memory`
  const float* q;                       // of the head that is in turn

  void open(const Plan& plan, int64_t rows, int64_t kv_heads) {
    const int64_t all = std::max(rows, kFew * kv_heads);
    int64_t used = 16;  // of them some for a beginning at a line
    float** pieces[] = {&queries, &weights, &out, &total, &wide_keys, &wide_values};
    const int64_t counts[] = {all * plan.wide,       rows * kRun,      rows * plan.wide_value,
                              all * plan.wide_value, kRun * plan.wide, kRun * plan.wide_value};
    for (int64_t count : counts) used += (count + 15) / 16 * 16;
    if (static_cast<int64_t>(memory.size()) < used) memory.resize(used);
    auto at = reinterpret_cast<uintptr_t>(memory.data());
    float* next = reinterpret_cast<float*>((at + 63) / 64 * 64);
    for (int i = 0; i < 6; ++i) *pieces[i] = next, next += (counts[i] + 15) / 16 * 16;
    for (int p = 0; p < kRun; ++p) {
      packed_keys[p] = p * plan.wide * static_cast<int64_t>(sizeof(float));
      packed_values[p] = p * plan.wide_value * static_cast<int64_t>(sizeof(float));
    }
    places[0].tile = places[1].tile = nullptr;
    spans.resize(rows), runs.resize(rows), sums.resize(all);
  }
};

}  // namespace paged
