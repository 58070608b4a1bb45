// Rows in bf16 times codes, bit for bit as pair_rows.cpp has it of the decoded weight in bf16.
//
// Codes of the layout "dots" are decoded a panel of 32 outputs and a block of columns at a time,
// once for all rows, into the order in which products read pairs: lanes are outputs on both sides,
// so nothing is turned.

#include <algorithm>
#include <cstring>
#include <vector>

#include "lane_numbers.h"
#include "pair_rows.h"

// Mirrored in cpu/packed.py. What rows are and where they go is read of `rows` alone.
struct PackedPairs {
  PairRows rows;  // the weight is null
  Packed codes;
  const int32_t* own_columns;   // [own]: columns whose numbers stand in for their codes, or null
  const BFloat16* own_numbers;  // [outputs, own]
  int64_t own;
};

namespace {

constexpr int64_t kWidth = 32;       // outputs of a panel of pairs
constexpr int64_t kAhead = 4 << 10;  // bytes of codes
constexpr int64_t kBlock = 128;      // pairs of columns: 16 KB, for the first-level cache

// Columns [first, last) of a panel of 16 outputs: to: [pairs, 32 outputs], of which they are those
// from where it points. first is a multiple of 16. Columns that only fill up are written to the end
// of the step of 16.
template <int kBits, int kCodes, int kPlain, bool kZeros>
void decode(const Packed& p, int64_t panel, int64_t first, int64_t last, uint32_t* to) {
  constexpr int64_t kEach = 8 / kBits, kWide = 4 * kEach;  // columns of a vector
  constexpr int64_t kColumn = kPanel * kBits;              // bits of a column
  const uint8_t* codes = p.codes + panel * p.panel_bytes;
  for (int64_t k = first, end; k < last; k = end) {
    const int64_t group = k / p.group;
    end = std::min(last, (group + 1) * p.group);
    for (int output = 0; output < kPanel; output += kRows) {
      LaneNumbers<kBits, kCodes, kPlain, kZeros> numbers;
      numbers.read(p, panel, group, output);
      const uint8_t* from = codes + k * kColumn / 8 + 4 * output;
      uint32_t* pairs = to + (k - first) / 2 * kWidth + output;
      for (int64_t c = k; c < end; c += kWide, from += 4 * kPanel, pairs += kWide / 2 * kWidth) {
        Ints packed;
        std::memcpy(&packed, from, sizeof packed);
        if (output == 0) __builtin_prefetch(from + kAhead);
        numbers.store_pairs(packed, pairs, kWidth);
      }
    }
  }
}

// A column's half of a pair. Pairs are words: numbers of 16 bits must not be written beside them.
inline void put(int64_t column, uint32_t number, uint32_t& pair) {
  const int64_t shift = column % 2 * 16;
  pair = (pair & ~(0xffffu << shift)) | number << shift;
}

// Makes blocks of a panel of pairs.
template <int kBits, int kCodes, int kPlain, bool kZeros>
struct Maker {
  const PackedPairs& both;

  // Columns [first, last) of the panel's outputs, in the places that codes have.
  void decode_both(int64_t panel, int64_t first, int64_t last, uint32_t* to) const {
    const Packed& p = both.codes;
    for (int64_t half = 0; half < kWidth / kPanel; ++half)
      if ((panel * kWidth + half * kPanel) < p.outputs)
        decode<kBits, kCodes, kPlain, kZeros>(p, panel * (kWidth / kPanel) + half, first, last,
                                              to + half * kPanel);
  }

  // All columns of a panel: they may come from anywhere.
  void decode_permuted(int64_t panel, uint32_t* to) const {
    static thread_local std::vector<uint32_t> room;
    const Packed& p = both.codes;
    room.resize((p.inputs + kStep - 1) / kStep * kStep / 2 * kWidth);
    decode_both(panel, 0, p.inputs, room.data());
    for (int64_t i = 0; i < p.inputs; ++i) {
      const int64_t c = p.columns[i];
      const uint32_t* from = room.data() + i / 2 * kWidth;
      for (int64_t j = 0; j < kWidth; ++j)
        put(c, from[j] >> (i % 2 * 16) & 0xffff, to[c / 2 * kWidth + j]);
    }
  }

  // Numbers of columns in [first, last) that stand in for codes.
  void put_own(int64_t panel, int64_t first, int64_t last, uint32_t* to) const {
    const int64_t output = panel * kWidth, count = std::min(kWidth, both.codes.outputs - output);
    for (int64_t i = 0; i < both.own; ++i) {
      const int64_t c = both.own_columns[i];
      if (c < first || c >= last) continue;
      const BFloat16* from = both.own_numbers + output * both.own + i;
      for (int64_t j = 0; j < count; ++j)
        put(c, from[j * both.own].bits, to[(c - first) / 2 * kWidth + j]);
    }
  }

  void operator()(int64_t panel, int64_t begin, int64_t count, uint32_t* to) const {
    static thread_local std::vector<uint32_t> whole;
    const Packed& p = both.codes;
    const int64_t first = 2 * begin, last = std::min(first + 2 * count, p.inputs);
    if (p.columns) {
      whole.resize((p.inputs + 1) / 2 * kWidth);
      if (begin == 0) decode_permuted(panel, whole.data());
      std::memcpy(to, whole.data() + begin * kWidth, count * kWidth * sizeof *to);
    } else {
      decode_both(panel, first, last, to);
    }
    if (last % 2)  // what is beside the last column
      for (int64_t j = 0; j < kWidth; ++j) to[(count - 1) * kWidth + j] &= 0xffff;
    put_own(panel, first, last, to);
  }
};

template <int kBits, int kCodes, int kPlain, bool kZeros = false>
void product(const PackedPairs& p) {
  pairs_made(p.rows, Maker<kBits, kCodes, kPlain, kZeros>{p}, kBlock);
}

template <int kBits, int kCodes, int kPlain>
void by_zeros(const PackedPairs& p) {
  if constexpr (kCodes == kWhole)
    if (p.codes.zeros) return product<kBits, kCodes, kPlain, true>(p);
  product<kBits, kCodes, kPlain>(p);
}

// bf16 is what numbers become anyway.
template <int kBits, int kCodes>
void by_plain(const PackedPairs& p) {
  if (p.codes.plain_kind == kFloat16) by_zeros<kBits, kCodes, kFloat16>(p);
  else by_zeros<kBits, kCodes, kFloat32>(p);
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
