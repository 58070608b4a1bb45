// What tiles of rows and outputs of a panel have in common whose numbers stay in registers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"

constexpr int kLine = 64;            // bytes of an output in a chunk
constexpr int64_t kAhead = 4 << 10;  // bytes of codes

// Where the next line of memory begins: vectors across two are read more slowly.
template <typename T>
inline T* at_line(T* from) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(from) + kLine - 1) / kLine * kLine);
}

// Some rows as tiles read them: those of a tile lie together, [16 columns][row][16], then zeros.
struct Near {
  int64_t places;
  std::vector<float> x;

  void read(const Packed& p) {
    constexpr int64_t kLeast = kLine / sizeof(float);  // so that vectors begin with a line
    places = (p.inputs + kStep - 1) / kStep * kStep;
    x.assign(p.rows * places + kLeast, 0.0f);
    for (int64_t row = 0; row < p.rows;) {
      const int high = height(p.rows - row);
      for (int i = 0; i < high; ++i)
        for (int64_t k = 0; k < p.inputs; k += kStep)
          std::copy_n(p.x + (row + i) * p.stride + k, std::min<int64_t>(kStep, p.inputs - k),
                      at(row) + (k * high + kStep * i));
      row += high;
    }
  }

  float* at(int64_t row) { return at_line(x.data()) + row * places; }
};

// Into a register, once: GCC would read it anew for every product.
inline Vec load_once(const float* from) { return *reinterpret_cast<const volatile Vec*>(from); }

// What a tile's sums, [kHigh, outputs], come to. Outputs beyond the last are not written.
template <int kHigh>
inline void finish(const Packed& p, const Vec* sums, int64_t row, int64_t output) {
  store_totals<kHigh>(sums, p.bias ? p.bias + output : nullptr, p.outputs - output,
                      p.out + row * p.out_stride + output, p.out_stride);
}
