// Codes of a weight in panels of 16 outputs, as compress_kernels/panels.py lays them out.

#pragma once

#include <algorithm>
#include <cstdint>

#include "stored.h"

constexpr int kPanel = 16;
constexpr int kStep = 16;             // columns that are gone through at once
constexpr int kParts = kPanel / kRows;  // vectors that hold a number for each output of a panel

// Mirrored in cpu/packed.py.
struct Packed {
  const float* x;           // [rows, inputs], rows `stride` apart
  const uint8_t* codes;     // panels, each of `panel_bytes` one after the other
  const void* scales;       // [panels, groups, 16], of `scale_kind`
  const int8_t* zeros;      // as the scales, or null
  const int32_t* columns;   // [inputs]: which column of x is in a place; or null for the same
  const float* bias;        // [outputs] or null
  float* out;               // [rows, outputs], rows `out_stride` apart
  int64_t rows, inputs, outputs, stride, out_stride, panel_bytes, group, groups;
  int32_t bits, scale_kind, plain_kind, planes, threads;

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
};

// The numbers of a group's outputs in a panel, from output `first` on.
inline Vec scales_at(const Packed& p, int64_t panel, int64_t group, int first) {
  const int64_t at = (panel * p.groups + group) * kPanel + first;
  if (p.scale_kind == kBFloat16)
    return load_stored(static_cast<const BFloat16*>(p.scales) + at, kRows);
  if (p.scale_kind == kFloat16)
    return load_stored(static_cast<const Float16*>(p.scales) + at, kRows);
  return load_stored(static_cast<const float*>(p.scales) + at, kRows);
}

inline const int8_t* zeros_at(const Packed& p, int64_t panel, int64_t group, int first) {
  return p.zeros + (panel * p.groups + group) * kPanel + first;
}
