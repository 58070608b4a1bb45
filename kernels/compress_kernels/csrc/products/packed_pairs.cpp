// Rows in bf16 times codes, bit for bit as pair_rows.cpp has it of the decoded weight in bf16.
//
// Codes of the layout "rows" are decoded a panel of 32 outputs and a block of columns at a time,
// once for all rows, into the order in which products read pairs.

#include <algorithm>
#include <cstring>
#include <vector>

#include "decode.h"
#include "pair_rows.h"

// Mirrored in cpu/packed.py. What rows are and where they go is read of `rows` alone.
struct PackedPairs {
  PairRows rows;  // the weight is null
  Packed codes;
};

namespace {

constexpr int64_t kWidth = 32;  // outputs of a panel of pairs

template <int kBits, int kCodes, int kPlain>
void outputs(const Packed& p, int64_t panel, int64_t first, int64_t last, BFloat16* to,
             int64_t stride) {
#ifdef __AVX512F__
  if constexpr (tabled(kCodes, kBits))
    return decode<kBits, kCodes, kPlain, Table<kBits>>(p, panel, first, last, to, stride);
#endif
  decode<kBits, kCodes, kPlain>(p, panel, first, last, to, stride);
}

template <int kBits, int kCodes, int kPlain>
void product(const PackedPairs& both) {
  const Packed& p = both.codes;
  pairs_made(both.rows, [&p](int64_t panel, int64_t begin, int64_t count, uint32_t* to) {
    static thread_local std::vector<BFloat16> room;
    // Permuted columns may come from anywhere: they are decoded when a panel begins, all of them.
    const int64_t first = p.columns ? 0 : 2 * begin;
    const int64_t last = p.columns ? p.inputs : std::min(first + 2 * count, p.inputs);
    const int64_t wide = last - first, stride = (wide + kStep - 1) / kStep * kStep;
    const int64_t rows = std::min(kWidth, p.outputs - panel * kWidth);
    if (static_cast<int64_t>(room.size()) < kWidth * stride) room.resize(kWidth * stride);
    if (!p.columns || begin == 0)
      for (int64_t row = 0; row < rows; row += kPanel)
        outputs<kBits, kCodes, kPlain>(p, (panel * kWidth + row) / kPanel, first, last,
                                       room.data() + row * stride, stride);
    const int64_t skipped = 2 * begin - first;
    turn_outputs(room.data() + skipped, stride, rows, std::min(2 * count, p.inputs - 2 * begin), to);
  });
}

template <int kBits, int kCodes>
void by_plain(const PackedPairs& p) {
  if (p.codes.plain_kind == kBFloat16) product<kBits, kCodes, kBFloat16>(p);
  else if (p.codes.plain_kind == kFloat16) product<kBits, kCodes, kFloat16>(p);
  else product<kBits, kCodes, kFloat32>(p);
}

void unsigned_product(const PackedPairs& p) {
  if (p.codes.bits == 2) product<2, kUnsigned, kFloat32>(p);
  else if (p.codes.bits == 4) product<4, kUnsigned, kFloat32>(p);
  else product<8, kUnsigned, kFloat32>(p);
}

}  // namespace

extern "C" void packed_pairs(const PackedPairs* p) {
  if (p->codes.codes_are == kE4M3) by_plain<8, kE4M3>(*p);
  else if (p->codes.codes_are == kE2M1) by_plain<4, kE2M1>(*p);
  else if (p->codes.codes_are == kIQ4) product<4, kIQ4, kFloat32>(*p);
  else if (p->codes.codes_are == kUnsigned) unsigned_product(*p);
  else if (p->codes.bits == 2) by_plain<2, kWhole>(*p);
  else if (p->codes.bits == 4) by_plain<4, kWhole>(*p);
  else by_plain<8, kWhole>(*p);
}
