// Rows times a dense weight, as linear.cpp computes it.

#pragma once

#include <cstdint>

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
