// Rows in bf16 times a weight in bf16, as pair_rows.cpp computes it.

#pragma once

#include <cstdint>
#include <functional>

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

// The same of a weight that is made as it is needed: pairs [begin, begin + count) of a panel, those
// of one after the other, from `to` on. Outputs that only fill up may be anything. block: the most
// that is made at once, a multiple of 8 and 512 at most.
using MadePairs = std::function<void(int64_t panel, int64_t begin, int64_t count, uint32_t* to)>;
void pairs_made(const PairRows& p, const MadePairs& made, int64_t block);
