// Rows in bf16 times a weight in bf16, as pair_rows.cpp computes it.

#pragma once

#include <cstdint>

#include "stored.h"

// Mirrored in cpu/pairs.py.
struct PairRows {
  const BFloat16* x;       // [rows, columns], rows `stride` apart
  const BFloat16* weight;  // [panels, pairs of columns, 32 outputs, 2], or [outputs, columns]
  const BFloat16* bias;    // [outputs] or null
  BFloat16* out;           // [rows, outputs], rows `out_stride` apart
  int64_t rows, columns, outputs, stride, out_stride;
  int32_t panels, threads;  // panels: whether the weight lies in them

  int64_t pairs() const { return (columns + 1) / 2; }
};

extern "C" void pair_rows(const PairRows* p);
