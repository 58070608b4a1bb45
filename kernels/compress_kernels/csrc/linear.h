// Rows times an fp32 weight, as linear.cpp computes it.

#pragma once

#include <cstdint>

// Mirrored in cpu/linear.py.
struct Linear {
  const float* x;       // [rows, columns], rows `stride` apart
  const float* weight;  // [outputs, columns]
  const float* bias;    // [outputs] or null
  float* out;           // [rows, outputs], rows `out_stride` apart
  int64_t rows, columns, outputs, stride, out_stride;
  int32_t threads;
};

extern "C" void linear_rows(const Linear* l);
