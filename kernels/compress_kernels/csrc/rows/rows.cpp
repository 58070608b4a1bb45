// Rows that are turned, looked up or added; see rows.h.

#include <cmath>
#include <cstdint>
#include <vector>

#include "rows.h"

struct Rotate {
  Heads x, out;      // [rows, heads, dim]
  const float* cos;  // [rows, pairs]
  const float* sin;
  int64_t rows, heads, dim, pairs;
  int32_t late, kind;  // late: rounded once, behind all of it
  int32_t interleaved;  // the two of a pair are neighbours in x; out has all first ones, then all others
  int32_t threads;
};

struct Spread {
  Heads x, out;                    // [rows, heads, dim]
  int64_t rows, heads, dim, size;  // size: of each part that is turned, a power of two
  int32_t kind;
};

struct Gather {
  const void* from;      // [any, width] of `kind`, or bf16 in panels of 32 rows (pairs.py)
  const int64_t* index;  // [rows]
  void* out;             // [rows, width], fp32 or of `kind`
  int64_t rows, width;
  float factor;
  int32_t kind, out_kind, panels;
};

struct Add {
  const void* x;  // [rows, width]
  const void* other;
  void* out;  // may be x
  int64_t rows, width;
  int32_t kind, threads;
};

struct Highest {
  const void* x;   // [rows, width]
  int64_t* index;  // [rows], of equals the lowest
  float* highest;  // [rows]; not a number where one of a row is none
  int64_t rows, width;
  int32_t kind, threads;
};

namespace {

// A product by itself: fused with the sum behind it, it would not be rounded as torch rounds it.
inline Vec product(Vec a, Vec b) {
  Vec x = a * b;
  asm("" : "+m"(x));
  return x;
}

// A head that is turned; apart: room for its pairs, where they are interleaved.
template <typename T>
void turn_head(const Rotate& r, int64_t row, int64_t head, T* apart) {
  const T* from = r.x.at<const T>(row, head);
  for (int64_t c = 0; c < r.pairs * r.interleaved; ++c)
    apart[c] = from[2 * c], apart[r.pairs + c] = from[2 * c + 1];
  const T* x = r.interleaved ? apart : from;
  T* out = r.out.at<T>(row, head);
  for (int64_t c = 0; c < r.pairs; c += kRows) {
    const int64_t left = r.pairs - c;
    const Vec cos = load_at<float>(r.cos, row * r.pairs + c, left);
    const Vec sin = load_at<float>(r.sin, row * r.pairs + c, left);
    const Vec a = load_stored(x + c, left), b = load_stored(x + r.pairs + c, left);
    Vec terms[] = {product(a, cos), product(b, sin), product(b, cos), product(a, sin)};
    if (!r.late)
      for (Vec& term : terms) term = settled<T>(term);
    const Vec one = terms[0] - terms[1], two = terms[2] + terms[3];
    store_stored(one, out + c, left);
    store_stored(two, out + r.pairs + c, left);
  }
  std::memcpy(out + 2 * r.pairs, from + 2 * r.pairs, (r.dim - 2 * r.pairs) * sizeof(T));
}

template <typename T>
void turn(const Rotate& r) {
  const int64_t grain = rows_worth_a_thread(r.heads * r.dim);
  in_parallel(r.threads, r.rows, grain, [&](int64_t first, int64_t last) {
    std::vector<T> apart(r.interleaved ? 2 * r.pairs : 0);
    for (int64_t row = first; row < last; ++row)
      for (int64_t head = 0; head < r.heads; ++head) turn_head(r, row, head, apart.data());
  });
}

template <typename T>
void spread_of(int64_t size, const T* x, T* out) {
  std::vector<float> old(size), made(size);
  for (int64_t c = 0; c < size; c += kRows)
    store_stored(load_stored(x + c, size - c), old.data() + c, size - c);
  for (int64_t step = 1; step < size; step *= 2) {
    for (int64_t at = 0; at < size; at += 2 * step)
      for (int64_t c = at; c < at + step; ++c) {
        made[c] = old[c] + old[c + step];
        made[c + step] = old[c] - old[c + step];
      }
    old.swap(made);
  }
  const Vec root = splat(static_cast<float>(std::sqrt(static_cast<double>(size))));
  for (int64_t c = 0; c < size; c += kRows)
    store_stored(load_stored(old.data() + c, size - c) / root, out + c, size - c);
}

template <typename T>
void spread(const Spread& s) {
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t part = 0; part < s.dim; part += s.size)
        spread_of(s.size, s.x.at<const T>(row, head) + part, s.out.at<T>(row, head) + part);
}

template <typename T, typename Out>
void gather(const Gather& g) {
  for (int64_t row = 0; row < g.rows; ++row) {
    const T* from = static_cast<const T*>(g.from) + g.index[row] * g.width;
    Out* out = static_cast<Out*>(g.out) + row * g.width;
    for (int64_t c = 0; c < g.width; c += kRows) {
      const int64_t left = g.width - c;
      store_stored(load_stored(from + c, left) * g.factor, out + c, left);
    }
  }
}

// Rows of panels: of each two columns one row's numbers lie side by side, 32 rows' one behind the
// other.
void gather_pairs(const Gather& g) {
  constexpr int64_t kPanel = 32;
  const int64_t pairs = (g.width + 1) / 2;
  std::vector<uint32_t> found(pairs + kRows);
  for (int64_t row = 0; row < g.rows; ++row) {
    const int64_t panel = g.index[row] / kPanel, place = g.index[row] % kPanel;
    const uint32_t* from = static_cast<const uint32_t*>(g.from) + panel * pairs * kPanel + place;
    for (int64_t p = 0; p < pairs; ++p) found[p] = from[p * kPanel];
    const BFloat16* numbers = reinterpret_cast<const BFloat16*>(found.data());
    BFloat16* out = static_cast<BFloat16*>(g.out) + row * g.width;
    for (int64_t c = 0; c < g.width; c += kRows)
      store_stored(load_stored(numbers + c, g.width - c) * g.factor, out + c, g.width - c);
  }
}

template <typename T>
void gather_as(const Gather& g) {
  if (g.out_kind == kFloat32) gather<T, float>(g);
  else gather<T, T>(g);
}

template <typename T>
void add(const Add& a) {
  T* out = static_cast<T*>(a.out);
  in_parallel(a.threads, a.rows, rows_worth_a_thread(a.width), [&](int64_t first, int64_t last) {
    const int64_t end = last * a.width;
    for (int64_t c = first * a.width; c < end; c += kRows)
      store_stored(load_at<T>(a.x, c, end - c) + load_at<T>(a.other, c, end - c), out + c, end - c);
  });
}

// Lane by lane the highest number so far, not a number above all, and where it lies.
struct Tops {
  Vec values;
  Integers places;

  void see(Vec x, Integers at) {
    const Integers higher = (x > values) | ((x != x) & (values == values));
    values = higher ? x : values;
    places = higher ? at : places;
  }
};

template <typename T>
void highest(const T* x, int64_t width, int64_t& index, float& value) {
  Integers at;
  for (int i = 0; i < kRows; ++i) at[i] = i;
  const Vec lowest = splat(-__builtin_inff());
  Tops tops{lowest, at};
  int64_t c = 0;
  for (; c + kRows <= width; c += kRows, at += kRows) tops.see(load_stored(x + c, kRows), at);
  if (c < width) {
    const Vec last = load_stored(x + c, width - c);
    tops.see(at < static_cast<int32_t>(width) ? last : lowest, at);
  }
  int best = 0;
  for (int i = 1; i < kRows; ++i) {
    const float a = tops.values[i], b = tops.values[best];
    const bool equal = a == b || (a != a && b != b);
    const bool above = a > b || (a != a && b == b);
    if (above || (equal && tops.places[i] < tops.places[best])) best = i;
  }
  index = tops.places[best], value = tops.values[best];
}

template <typename T>
void highest_of(const Highest& h) {
  row_by_row(h.threads, h.rows, h.width, [&](int64_t row) {
    highest(static_cast<const T*>(h.x) + row * h.width, h.width, h.index[row], h.highest[row]);
  });
}

}  // namespace

extern "C" void highest_of_rows(const Highest* h) {
  if (h->kind == kFloat32) highest_of<float>(*h);
  else if (h->kind == kBFloat16) highest_of<BFloat16>(*h);
  else highest_of<Float16>(*h);
}

extern "C" void rotate_heads(const Rotate* r) {
  if (r->kind == kFloat32) turn<float>(*r);
  else if (r->kind == kBFloat16) turn<BFloat16>(*r);
  else turn<Float16>(*r);
}

extern "C" void spread_heads(const Spread* s) {
  if (s->kind == kFloat32) spread<float>(*s);
  else if (s->kind == kBFloat16) spread<BFloat16>(*s);
  else spread<Float16>(*s);
}

extern "C" void gather_rows(const Gather* g) {
  if (g->panels) gather_pairs(*g);
  else if (g->kind == kFloat32) gather_as<float>(*g);
  else if (g->kind == kBFloat16) gather_as<BFloat16>(*g);
  else gather_as<Float16>(*g);
}

extern "C" void add_rows(const Add* a) {
  if (a->kind == kFloat32) add<float>(*a);
  else if (a->kind == kBFloat16) add<BFloat16>(*a);
  else add<Float16>(*a);
}
