// Keys or values of a step, written into blocks: as they are, or as 8-bit codes with a scale for
// each token and head.

#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "stored.h"

// Mirrored in cpu/states.py.
struct States {
  const void* source;    // [rows, heads, dim], rows `stride` apart
  void* target;          // [blocks, heads, block_size, dim]
  Float16* scales;       // [blocks, heads, block_size] for int8, else null
  const int64_t* slots;  // [rows]
  int64_t rows, stride, heads, dim, block_size;
  int32_t source_kind, target_kind, threads;
};

namespace {

template <typename From, typename To>
void write(const From* from, To* to, int64_t dim, Float16*) {
  for (int64_t c = 0; c < dim; c += kRows) store_stored(load_stored(from + c, dim - c), to + c, dim - c);
}

// The scale is rounded first: codes are the best ones for the scale that is stored.
template <typename From>
void write(const From* from, int8_t* to, int64_t dim, Float16* scale) {
  Vec top{};
  for (int64_t c = 0; c < dim; c += kRows) {
    const Vec x = load_stored(from + c, dim - c), size = floats(words(x) & 0x7fffffffu);
    top = (size > top) | (size != size) ? size : top;  // NaN goes on
  }
  float largest = top[0];
  for (int i = 1; i < kRows; ++i) largest = top[i] > largest || top[i] != top[i] ? top[i] : largest;
  Vec step = splat(largest) / splat(127.0f);
  step = nearest_of(step > splat(65504.0f) ? splat(65504.0f) : step, scale);
  store_exact(step, scale, 1);
  const Vec unit = step == Vec{} ? splat(1.0f) : step, most = splat(127.0f);
  for (int64_t c = 0; c < dim; c += kRows) {
    Vec code = (load_stored(from + c, dim - c) / unit + 12582912.0f) - 12582912.0f;
    code = code > most ? most : code;
    code = code < -most ? -most : code;
    code = code == code ? code : Vec{};  // the scale says that it is not a number
    store_raw(__builtin_convertvector(code, Bytes), to + c, dim - c);
  }
}

template <typename From, typename To>
void write_all(const States& s) {
  row_by_row(s.threads, s.rows, s.heads * s.dim, [&](int64_t row) {
    const int64_t block = s.slots[row] / s.block_size, offset = s.slots[row] % s.block_size;
    for (int64_t head = 0; head < s.heads; ++head) {
      const int64_t at = (block * s.heads + head) * s.block_size + offset;
      const From* from = static_cast<const From*>(s.source) + row * s.stride + head * s.dim;
      write(from, static_cast<To*>(s.target) + at * s.dim, s.dim, s.scales + at);
    }
  });
}

template <typename From>
void write_as(const States& s) {
  switch (s.target_kind) {
    case kFloat32: return write_all<From, float>(s);
    case kBFloat16: return write_all<From, BFloat16>(s);
    case kFloat16: return write_all<From, Float16>(s);
    default: return write_all<From, int8_t>(s);
  }
}

}  // namespace

extern "C" void store_states(const States* s) {
  switch (s->source_kind) {
    case kFloat32: return write_as<float>(*s);
    case kBFloat16: return write_as<BFloat16>(*s);
    default: return write_as<Float16>(*s);
  }
}
