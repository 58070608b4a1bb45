// Rows times a dense weight, as linear.cpp computes it.

#pragma once

#include <cstdint>
#include <functional>

// Mirrored in cpu/linear.py.
struct Linear {
  const float* x;      // [rows, columns], rows `stride` apart
  const void* weight;  // [outputs, columns] of `kind`
  const float* bias;   // [outputs] or null
  float* out;          // [rows, outputs], rows `out_stride` apart
  int64_t rows, columns, outputs, stride, out_stride;
  int32_t kind, threads;
};

extern "C" void linear_rows(const Linear* l);

// The same of a weight that is made as it is needed, `each` outputs at a time, a multiple of 16:
// where outputs [from, to) lie until the thread asks again. Rows are laid out once for all of them.
using MadeWeight = std::function<const void*(int64_t from, int64_t to)>;
void linear_made(const Linear& l, int64_t each, const MadeWeight& made);
