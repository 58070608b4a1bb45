// A mixture of experts: who is chosen for a row, and what the chosen ones make of it.
//
// An expert is a program of its own, which runs once for all rows that chose it. A row's parts are
// added in the order of its choice, so its bits depend on no other row.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "program.h"
#include "attention/softmax.h"

// All mirrored in cpu/experts.py.
struct Choice {
  const void* logits;   // [rows, experts] of `kind`
  int64_t* index;       // [rows, chosen], the largest share first, of equals the lowest number
  float* shares;        // [rows, chosen]
  int64_t rows, experts, chosen;
  int32_t normalised;  // shares of the chosen add up to 1
  int32_t kind;
};

struct Experts {
  const Program* programs;  // of each expert; runs give them rows, threads, which rows
  const int64_t* index;     // [rows, chosen]
  const float* shares;
  const void* made;  // [rows of an expert, width] of `kind`: what its program leaves
  float* parts;      // [rows, chosen, width]
  void* out;         // [rows, width] of `kind`
  int64_t rows, experts, chosen, width;
  int32_t threads, kind;
};

namespace {

// room: the logits, filled up to whole vectors with what has no share. They become shares.
void soften_all(float* room, int64_t wide) {
  float top = room[0];
  for (int64_t i = 1; i < wide; ++i) top = paged::larger(top, room[i]);
  Vec sums{};
  for (int64_t i = 0; i < wide; i += kRows) {
    const Vec x = exponential(load_stored(room + i, kRows) - splat(top));
    sums += x;
    store_stored(x, room + i, kRows);
  }
  float sum = 0.0f;
  for (int i = 0; i < kRows; ++i) sum += sums[i];
  for (int64_t i = 0; i < wide; ++i) room[i] /= sum;
}

template <typename T>
void choose(const Choice& c, int64_t row, float* room, int64_t wide) {
  const T* logits = static_cast<const T*>(c.logits) + row * c.experts;
  for (int64_t i = 0; i < c.experts; i += kRows)
    store_stored(load_stored(logits + i, c.experts - i), room + i, c.experts - i);
  std::fill(room + c.experts, room + wide, -__builtin_inff());
  soften_all(room, wide);
  int64_t* index = c.index + row * c.chosen;
  float* shares = c.shares + row * c.chosen;
  float sum = 0.0f;
  for (int64_t k = 0; k < c.chosen; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < c.experts; ++i) {
      const bool taken = std::find(index, index + k, i) != index + k;
      if (!taken && (best < 0 || room[i] > room[best])) best = i;
    }
    index[k] = best, shares[k] = room[best], sum += room[best];
  }
  for (int64_t k = 0; k < c.chosen * c.normalised; ++k) shares[k] /= sum;
}

// to = from * factor; to += from.
template <typename T>
void scaled(const T* from, float factor, float* to, int64_t width) {
  for (int64_t i = 0; i < width; i += kRows)
    store_stored(load_stored(from + i, width - i) * factor, to + i, width - i);
}

void add(const float* from, float* to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] += from[i];
}

// What chose each expert, as numbers of parts: those of expert e are from first[e] to first[e + 1].
struct Chosen {
  std::vector<int64_t> first, parts;
};

Chosen by_expert(const Experts& e) {
  const int64_t count = e.rows * e.chosen;
  Chosen found{std::vector<int64_t>(e.experts + 1), std::vector<int64_t>(count)};
  for (int64_t i = 0; i < count; ++i) ++found.first[e.index[i] + 1];
  for (int64_t i = 0; i < e.experts; ++i) found.first[i + 1] += found.first[i];
  std::vector<int64_t> next = found.first;
  for (int64_t i = 0; i < count; ++i) found.parts[next[e.index[i]]++] = i;
  return found;
}

template <typename T>
void choose_all(const Choice& c) {
  const int64_t wide = (c.experts + kRows - 1) / kRows * kRows;
  std::vector<float> room(wide);
  for (int64_t row = 0; row < c.rows; ++row) choose<T>(c, row, room.data(), wide);
}

template <typename T>
void run(const Experts* e) {
  const Chosen chosen = by_expert(*e);
  std::vector<int64_t> taken(e->rows);
  for (int64_t expert = 0; expert < e->experts; ++expert) {
    const int64_t* parts = chosen.parts.data() + chosen.first[expert];
    const int64_t count = chosen.first[expert + 1] - chosen.first[expert];
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i) taken[i] = parts[i] / e->chosen;
    const int64_t values[] = {count, e->threads, reinterpret_cast<int64_t>(taken.data())};
    run_program(e->programs + expert, values);
    for (int64_t i = 0; i < count; ++i)
      scaled(static_cast<const T*>(e->made) + i * e->width, e->shares[parts[i]], e->parts + parts[i] * e->width, e->width);
  }
  for (int64_t row = 0; row < e->rows; ++row) {
    float* total = e->parts + row * e->chosen * e->width;
    T* out = static_cast<T*>(e->out) + row * e->width;
    for (int64_t k = 1; k < e->chosen; ++k) add(total + k * e->width, total, e->width);
    for (int64_t i = 0; i < e->width; i += kRows)
      store_stored(load_stored(total + i, e->width - i), out + i, e->width - i);
  }
}

}  // namespace

extern "C" void choose_experts(const Choice* c) {
  if (c->kind == kFloat32) choose_all<float>(*c);
  else if (c->kind == kBFloat16) choose_all<BFloat16>(*c);
  else choose_all<Float16>(*c);
}

extern "C" void run_experts(const Experts* e) {
  if (e->kind == kFloat32) run<float>(e);
  else if (e->kind == kBFloat16) run<BFloat16>(e);
  else run<Float16>(e);
}
