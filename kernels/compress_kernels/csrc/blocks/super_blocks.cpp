// Weights in llama.cpp's blocks: rounded with a search for their scales, and decoded. The
// specification is reference/super_blocks.py and compress_kernels/blocks/scales.py.
//
// Tiles hold kRows rows transposed, so every row's numbers are added in the order of its columns,
// whatever the instruction set; build.py has this file compiled without fused products for the same
// reason. A row's bytes are its own then, on every processor and on any number of threads.

#include <vector>

#include "blocks/shared_scales.h"
#include "parallel.h"
#include "stored.h"

// Mirrored in cpu/super_blocks.py.
struct RoundBlocks {
  BlockKind kind;
  Candidates candidates;
  SharedCandidates shared;
  const float* weight;      // [rows, width], rows `stride` apart
  const float* importance;  // [width]
  uint8_t* data;            // [rows, width / numbers * size]
  int64_t rows, width, stride;
  int32_t threads;
};

struct DecodeBlocks {
  BlockKind kind;
  const uint8_t* data;   // [any, blocks * size]
  const int64_t* index;  // [rows]: which of them; or null for all in order
  void* out;             // [rows, blocks * numbers], fp32 or bf16
  int64_t rows, blocks;
  float factor;  // of what was rounded to out's dtype
  int32_t out_kind, threads;
};

namespace {

constexpr int64_t kGrain = 1 << 13;  // numbers worth a thread

template <bool kOffset, class Levels>
void codes_of(const Block<kOffset, Levels>& b, const Shared& found, Vec* codes) {
  for (int j = 0; j < b.subs(); ++j) {
    const Vec step = found.d * found.scale[j], inverse = inverse_of(step);
    const Vec offset = kOffset ? found.dmin * found.minimum[j] : Vec{};
    for (int c = 0; c < b.kind.sub; ++c)
      codes[j * b.kind.sub + c] = b.levels.code(b.levels((b.numbers(j)[c] + offset) * inverse));
  }
}

void store(const BlockKind& kind, const Shared& found, const Vec* codes, int rows, uint8_t* data,
           int64_t stride) {
  uint8_t all[kRows * kNumbers];
  store_tile(codes, kind.numbers, rows, kind.numbers, all);
  const float sign = kind.minima == 1 ? -1.0f : 1.0f;  // its minimum is -1
  for (int r = 0; r < rows; ++r) {
    Fields f;
    std::copy_n(all + r * kind.numbers, kind.numbers, f.codes);
    f.d = to_half(found.d[r]), f.dmin = to_half(sign * found.dmin[r]);
    for (int j = 0; j < kind.numbers / kind.sub; ++j) {
      f.scales[j] = static_cast<int16_t>(found.scale[j][r]);
      f.minima[j] = static_cast<int16_t>(found.minimum[j][r]);
    }
    pack(kind, f, data + r * stride);
  }
}

template <bool kOffset, class Levels>
void round_rows(const RoundBlocks& t, int64_t first, int64_t last) {
  const BlockKind& kind = t.kind;
  const Levels levels(kind);
  std::vector<Vec> x(kind.numbers), w(kind.numbers), codes(kind.numbers);
  const int64_t stride = t.width / kind.numbers * kind.size;
  for (int64_t row = first * kRows; row < std::min(t.rows, last * kRows); row += kRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kRows, t.rows - row));
    for (int64_t c = 0; c < t.width; c += kind.numbers) {
      load_tile(t.weight + row * t.stride + c, t.stride, rows, kind.numbers, x.data());
      for (int i = 0; i < kind.numbers; ++i) w[i] = splat(t.importance[c + i]);
      const Block<kOffset, Levels> b{kind, levels, x.data(), w.data()};
      Grid1 wanted[kSubs];
      for (int j = 0; j < b.subs(); ++j)
        wanted[j] = search<kOffset>(b.numbers(j), b.weights(j), kind, t.candidates, levels);
      const Shared found = share(b, t.shared, wanted);
      codes_of(b, found, codes.data());
      store(kind, found, codes.data(), rows,
            t.data + row * stride + c / kind.numbers * kind.size, stride);
    }
  }
}

void decode_row(const BlockKind& kind, const uint8_t* data, int64_t blocks, float* out) {
  Fields f;
  for (int64_t i = 0; i < blocks; ++i, data += kind.size) {
    unpack(kind, data, f);
    const float d = from_half(f.d), dmin = kind.minima ? from_half(f.dmin) : 0;
    for (int c = 0; c < kind.numbers; ++c) {
      const int j = c / kind.sub;
      const float level = kind.table ? kTable[f.codes[c]] : f.codes[c] - kind.centre;
      const float value = d * f.scales[j] * level;
      *out++ = kind.minima ? value - dmin * f.minima[j] : value;
    }
  }
}

template <typename T>
void decode_rows(const DecodeBlocks& t, int64_t first, int64_t last) {
  const int64_t numbers = t.blocks * t.kind.numbers, size = t.blocks * t.kind.size;
  T* const out = static_cast<T*>(t.out);
  static thread_local std::vector<float> room;
  room.resize(numbers);
  for (int64_t row = first; row < last; ++row) {
    decode_row(t.kind, t.data + (t.index ? t.index[row] : row) * size, t.blocks, room.data());
    for (int64_t c = 0; c < numbers; c += kRows) {  // blocks are whole vectors
      const Vec x = nearest_of(load_stored(room.data() + c, kRows), out);
      store_stored(x * t.factor, out + row * numbers + c, kRows);
    }
  }
}

}  // namespace

extern "C" {

void round_blocks(const RoundBlocks* t) {
  const int64_t grain = std::max<int64_t>(1, kGrain / (kRows * t->width));
  in_parallel(t->threads, (t->rows + kRows - 1) / kRows, grain, [&](int64_t first, int64_t last) {
    if (t->kind.table) round_rows<false, TableLevels>(*t, first, last);
    else if (t->kind.minima) round_rows<true, WholeLevels>(*t, first, last);
    else round_rows<false, WholeLevels>(*t, first, last);
  });
}

void decode_blocks(const DecodeBlocks* t) {
  const int64_t grain = 1 + kGrain / (t->blocks * t->kind.numbers + 1);
  in_parallel(t->threads, t->rows, grain, [&](int64_t first, int64_t last) {
    if (t->out_kind == kBFloat16) decode_rows<BFloat16>(*t, first, last);
    else decode_rows<float>(*t, first, last);
  });
}
}
