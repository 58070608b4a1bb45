// GPTQ's column loop within blocks whose scales are there: codes are chosen column by column, and
// what one loses the later ones make up for (gptq/lazy.py has the form). The specification is
// reference/super_blocks.py. As in super_blocks.cpp a row's bytes are its own.

#include <vector>

#include "blocks/levels.h"
#include "parallel.h"

// Mirrored in cpu/super_blocks.py.
struct SettleBlocks {
  BlockKind kind;
  const float* weight;   // [rows, width], columns in the order they are visited
  const float* factor;   // [width, width], R of the Hessian in that order
  const int32_t* order;  // [width], where a visited column is stored
  uint8_t* data;         // blocks of width columns, rows `data_stride` apart; codes are replaced
  float* lost;           // [rows, width], weight less what is stored, as visited
  int64_t rows, width, stride, factor_stride, data_stride;
  int32_t threads;
};

namespace {

// Columns that are settled before all later ones are updated at once: a later column is then read
// and written once for as many products.
constexpr int64_t kPanel = 8;

struct Tile {
  std::vector<Vec> weight, pull, code, step, offset;
  std::vector<Fields> fields;  // of kRows rows
};

void load_grids(const SettleBlocks& t, int64_t row, int rows, Tile& tile) {
  const int64_t blocks = t.width / t.kind.numbers, subs = t.kind.numbers / t.kind.sub;
  for (int r = 0; r < rows; ++r)
    for (int64_t i = 0; i < blocks; ++i) {
      Fields& f = tile.fields[r * blocks + i];
      unpack(t.kind, t.data + (row + r) * t.data_stride + i * t.kind.size, f);
      const float d = from_half(f.d), dmin = t.kind.minima ? from_half(f.dmin) : 0;
      for (int64_t j = 0; j < subs; ++j) {
        tile.step[i * subs + j][r] = d * f.scales[j];
        tile.offset[i * subs + j][r] = t.kind.minima ? dmin * f.minima[j] : 0;
      }
    }
}

void update_later(const SettleBlocks& t, int64_t first, Tile& tile) {
  const int64_t count = std::min(kPanel, t.width - first);
  for (int64_t j = first + count; j < t.width; ++j) {
    Vec sum = tile.pull[j];
    for (int64_t i = first; i < first + count; ++i)
      sum += tile.weight[i] * t.factor[i * t.factor_stride + j];
    tile.pull[j] = sum;
  }
}

// Afterwards tile.weight has what was lost.
template <class Levels>
void settle(const SettleBlocks& t, const Levels& levels, Tile& tile) {
  for (int64_t first = 0; first < t.width; first += kPanel) {
    const int64_t last = std::min(first + kPanel, t.width);
    for (int64_t i = first; i < last; ++i) {
      const float* r = t.factor + i * t.factor_stride;
      const int64_t at = t.order[i], sub = at / t.kind.sub;
      const Vec step = tile.step[sub], offset = tile.offset[sub];
      const Vec updated = tile.weight[i] + tile.pull[i] * splat(1.0f / r[i]);
      const Vec level = levels((updated + offset) * inverse_of(step));
      const Vec lost = tile.weight[i] - (step * level - offset);
      for (int64_t j = i + 1; j < last; ++j) tile.pull[j] += lost * r[j];
      tile.weight[i] = lost;
      tile.code[at] = levels.code(level);
    }
    update_later(t, first, tile);
  }
}

void store_codes(const SettleBlocks& t, int64_t row, int rows, Tile& tile) {
  const int64_t blocks = t.width / t.kind.numbers;
  std::vector<uint8_t> codes(kRows * t.width);
  store_tile(tile.code.data(), t.width, rows, t.width, codes.data());
  for (int r = 0; r < rows; ++r)
    for (int64_t i = 0; i < blocks; ++i) {
      Fields& f = tile.fields[r * blocks + i];
      std::copy_n(codes.data() + r * t.width + i * t.kind.numbers, t.kind.numbers, f.codes);
      pack(t.kind, f, t.data + (row + r) * t.data_stride + i * t.kind.size);
    }
}

template <class Levels>
void settle_rows(const SettleBlocks& t, int64_t first, int64_t last) {
  const Levels levels(t.kind);
  const int64_t subs = t.width / t.kind.sub, blocks = t.width / t.kind.numbers;
  Tile tile;
  for (auto* part : {&tile.weight, &tile.pull, &tile.code}) part->resize(t.width);
  tile.step.resize(subs), tile.offset.resize(subs), tile.fields.resize(kRows * blocks);
  for (int64_t row = first * kRows; row < std::min(t.rows, last * kRows); row += kRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kRows, t.rows - row));
    load_tile(t.weight + row * t.stride, t.stride, rows, t.width, tile.weight.data());
    std::fill(tile.pull.begin(), tile.pull.end(), Vec{});
    load_grids(t, row, rows, tile);
    settle(t, levels, tile);
    store_codes(t, row, rows, tile);
    store_tile(tile.weight.data(), t.width, rows, t.width, t.lost + row * t.width);
  }
}

}  // namespace

extern "C" void settle_blocks(const SettleBlocks* t) {
  const int64_t grain = std::max<int64_t>(1, (1 << 13) / (kRows * t->width));
  in_parallel(t->threads, (t->rows + kRows - 1) / kRows, grain, [&](int64_t first, int64_t last) {
    t->kind.table ? settle_rows<TableLevels>(*t, first, last)
                  : settle_rows<WholeLevels>(*t, first, last);
  });
}
