// Rows in bf16 times a weight in bf16, summed in fp32 and rounded once.
//
// A sum of an output goes along the columns, two at a time (dots.h), whatever the number of rows,
// the tile or the layout of the weight is: so a row's bits are its own. Panels of 32 outputs are one
// stream: what a register takes of it is a pair of columns of 16 outputs, and each row gives that
// pair to all of them. A weight that lies by rows is brought into that order block by block.

#include "pair_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dots.h"
#include "parallel.h"

namespace {

constexpr int kPanel = 32;                 // outputs
constexpr int kParts = kPanel / kRows;     // vectors of a panel's sums
constexpr int kHigh = kRows == 16 ? 12 : 3;  // rows of a tile at most: sums fill the registers
constexpr int64_t kBlock = 512;            // pairs of columns that caches hold of a panel
constexpr int64_t kMost = 16 * kHigh;      // rows whose sums are kept from block to block
constexpr int kLine = 16;                  // pairs of a cache line
constexpr int64_t kAhead = 2048;           // pairs of a panel that are asked for before their time
constexpr int64_t kFurther = 256;          // numbers of a row that are asked for before their time

struct Sums { Vec of[kParts]; };

// Rows [first, first + rows) as tiles read them: of each tile [pairs, height].
struct Laid {
  const uint32_t* x;
  int64_t first, rows, tiles;
  int64_t row(int64_t tile) const { return rows * tile / tiles; }
};

// x: [pairs, kHeight]. w: [pairs, kPanel]. sums: of each row. What several rows ask for goes into the
// second-level cache (8 rows of 4096 x 4096 take 1.45 ms, into the first 1.95); one row is faster by
// the first.
template <int kHeight>
void multiply(const uint32_t* x, const uint32_t* w, int64_t pairs, Sums* sums) {
  Vec own[kHeight][kParts];
#pragma GCC unroll 12
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) own[i][j] = sums[i].of[j];
  for (int64_t p = 0; p < pairs; ++p, x += kHeight, w += kPanel) {
    for (int j = 0; j < kPanel; j += kLine)
      __builtin_prefetch(w + kAhead + j, 0, kHeight == 1 ? 3 : 2);
    Words part[kParts];
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) std::memcpy(&part[j], w + j * kRows, sizeof part[j]);
#pragma GCC unroll 12
    for (int i = 0; i < kHeight; ++i) {
      const Words both = x[i] - Words{};
#pragma GCC unroll 4
      for (int j = 0; j < kParts; ++j) own[i][j] = add_pairs(own[i][j], both, part[j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) sums[i].of[j] = own[i][j];
}

using Multiply = void (*)(const uint32_t*, const uint32_t*, int64_t, Sums*);
#if defined(__AVX512F__)
constexpr Multiply kByHeight[] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                  multiply<5>, multiply<6>, multiply<7>, multiply<8>,
                                  multiply<9>, multiply<10>, multiply<11>, multiply<12>};
#else
constexpr Multiply kByHeight[] = {multiply<1>, multiply<2>, multiply<3>};
#endif

// Rows of `columns` numbers, kRows at most and `stride` apart, as pairs of columns: to: [pairs, step]
// of which the rows come first. Of kRows numbers that are written of a pair, those behind are not
// theirs; nothing is written behind the last pair.
void turn(const BFloat16* from, int64_t stride, int64_t rows, int64_t columns, uint32_t* to,
          int64_t step) {
  const BFloat16* row[kRows];  // those beyond the last are the last again
  for (int64_t i = 0; i < kRows; ++i) row[i] = from + std::min(i, rows - 1) * stride;
  const int64_t end = (columns + 1) / 2 * step;
  for (int64_t c = 0; c < columns; c += 2 * kRows) {
    const int64_t left = std::min<int64_t>(2 * kRows, columns - c);
    Vec square[kRows];
    if (left == 2 * kRows) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        std::memcpy(&square[i], row[i] + c, sizeof(Vec));
        __builtin_prefetch(row[i] + c + kFurther);
      }
    } else {
      for (int i = 0; i < kRows; ++i) {
        square[i] = Vec{};
        std::memcpy(&square[i], row[i] + c, left * sizeof(BFloat16));
      }
    }
    transpose(square);
    for (int64_t p = 0; p < (left + 1) / 2; ++p) {
      const int64_t at = (c / 2 + p) * step;
      if (at + kRows <= end) std::memcpy(to + at, &square[p], sizeof(Vec));
      else std::memcpy(to + at, &square[p], (end - at) * sizeof(uint32_t));
    }
  }
}

Laid lay_out(const PairRows& p, int64_t first, int64_t rows, std::vector<uint32_t>& room) {
  const int64_t pairs = p.pairs(), needed = rows * pairs + kRows;
  if (static_cast<int64_t>(room.size()) < needed) room.resize(needed);
  const Laid laid{room.data(), first, rows, (rows + kHigh - 1) / kHigh};
  const BFloat16* from = p.x + first * p.stride;
  if (rows == 1) {
    room[pairs - 1] = 0;
    std::memcpy(room.data(), from, p.columns * sizeof(BFloat16));
    return laid;
  }
  uint32_t* to = room.data();
  in_parallel(p.threads, laid.tiles, rows_worth_a_thread(kHigh * pairs), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = laid.row(tile), height = laid.row(tile + 1) - row;
      turn(from + row * p.stride, p.stride, height, p.columns, to + row * pairs, height);
    }
  });
  return laid;
}

// Pairs [begin, begin + count) of a weight that lies by rows, as its panel has them.
void bring(const PairRows& p, int64_t panel, int64_t begin, int64_t count, uint32_t* to) {
  const int64_t columns = std::min(2 * count, p.columns - 2 * begin);
  const int64_t output = panel * kPanel, rows = std::min<int64_t>(kPanel, p.outputs - output);
  const BFloat16* from = p.weight + output * p.columns + 2 * begin;
  for (int64_t row = 0; row < rows; row += kRows)
    turn(from + row * p.columns, p.columns, std::min<int64_t>(kRows, rows - row), columns, to + row,
         kPanel);
}

void finish(const PairRows& p, const Laid& laid, int64_t panel, const Sums* sums) {
  for (int j = 0; j < kParts; ++j) {
    const int64_t output = panel * kPanel + j * kRows, left = p.outputs - output;
    if (left <= 0) return;
    const Vec bias = p.bias ? load_stored(p.bias + output, left) : Vec{};
    for (int64_t i = 0; i < laid.rows; ++i) {
      BFloat16* to = p.out + (laid.first + i) * p.out_stride + output;
      store_stored(p.bias ? sums[i].of[j] + bias : sums[i].of[j], to, left);
    }
  }
}

// What brings a block of a panel; nothing where the weight lies in panels.
struct Source {
  const MadePairs* made;
  int64_t block;
};

void panels(const PairRows& p, const Laid& laid, int64_t from, int64_t to, const Source& source) {
  alignas(64) uint32_t brought[kBlock * kPanel];
  Sums sums[kMost];
  const int64_t pairs = p.pairs(), block = source.block;
  for (int64_t panel = from; panel < to; ++panel) {
    std::fill_n(sums, laid.rows, Sums{});
    for (int64_t begin = 0; begin < pairs; begin += block) {
      const int64_t count = std::min(block, pairs - begin);
      const uint32_t* w = brought;
      if (source.made) (*source.made)(panel, begin, count, brought);
      else w = reinterpret_cast<const uint32_t*>(p.weight) + (panel * pairs + begin) * kPanel;
      const AsInstruction flushed;
      for (int64_t tile = 0; tile < laid.tiles; ++tile) {
        const int64_t row = laid.row(tile), height = laid.row(tile + 1) - row;
        kByHeight[height - 1](laid.x + row * pairs + begin * height, w, count, sums + row);
      }
    }
    finish(p, laid, panel, sums);
  }
}

void all_panels(const PairRows& p, const Source& source) {
  static thread_local std::vector<uint32_t> room;
  const int64_t count = (p.outputs + kPanel - 1) / kPanel;
  const int64_t parts = (p.rows + kMost - 1) / kMost;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = p.rows * part / parts, end = p.rows * (part + 1) / parts;
    const Laid laid = lay_out(p, first, end - first, room);
    const int64_t numbers = p.columns * kPanel;
    const int64_t grain = worth_a_thread(laid.rows * numbers / 2, 2 * numbers);
    in_parallel(p.threads, count, grain,
                [&](int64_t from, int64_t to) { panels(p, laid, from, to, source); });
  }
}

}  // namespace

void pairs_made(const PairRows& p, const MadePairs& made, int64_t block) {
  all_panels(p, {&made, std::min(block, kBlock)});
}

extern "C" void pair_rows(const PairRows* p) {
  if (p->panels) return all_panels(*p, {nullptr, kBlock});
  const MadePairs brought = [p](int64_t panel, int64_t begin, int64_t count, uint32_t* to) {
    bring(*p, panel, begin, count, to);
  };
  pairs_made(*p, brought, kBlock);
}
