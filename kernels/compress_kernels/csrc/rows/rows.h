// What a decoder does between its matrix products, row by row: every row goes through the same
// instructions, wherever it lies. Rounded to the dtype where torch rounds.
//
// norms.cpp, gates.cpp and rows.cpp have the functions; what they are given is mirrored in
// cpu/rows.py. There `kind` is that of x and out, and strides are in numbers.

#pragma once

#include <cstdint>

#include "parallel.h"
#include "stored.h"

// Numbers of a head lie side by side; heads, and rows of them, lie anywhere.
struct Heads {
  void* data;
  int64_t row, head;  // strides

  template <typename T>
  T* at(int64_t r, int64_t h) const { return static_cast<T*>(data) + r * row + h * head; }
};

template <typename T>
Vec load_at(const void* from, int64_t at, int64_t left) {
  return load_stored(static_cast<const T*>(from) + at, left);
}

template <typename T>
Vec settled(Vec x) {
  return nearest_of(x, static_cast<const T*>(nullptr));
}
