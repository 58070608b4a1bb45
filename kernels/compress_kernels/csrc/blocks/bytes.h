// Bytes of llama.cpp's blocks, taken apart and put together; the specification is
// compress_kernels/blocks/bytes.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int kNumbers = 256, kSubs = 16;  // of a block, at most

// How scales and minima of sub-blocks are packed. Mirrored in cpu/super_blocks.py, as BlockKind is.
enum Packing { kNone = 0, kQ2 = 1, kQ3 = 2, kQ4 = 3, kQ6 = 4, kIq4 = 5 };

struct BlockKind {
  int32_t numbers, size, sub, centre, bits;
  int32_t low_bits, low_width, high_width;           // high_width: 0 for codes without high bits
  int32_t at_d, at_dmin, at_scales, at_low, at_high;  // bytes from the beginning, -1 for what is not
  int32_t scale_low, scale_high, minima, packing, table;
};

// d and dmin: bits of fp16. A block without sub-blocks has one of scale 1 and, with a minimum, -1.
struct Fields {
  uint8_t codes[kNumbers];
  uint16_t d, dmin;
  int16_t scales[kSubs], minima[kSubs];
};

inline float from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, size = half & 0x7fffu;
  uint32_t bits = size << 13;
  float x;
  if (size >= 0x7c00u) {
    bits |= 0x7f800000u;  // infinity and NaN
  } else if (size >= 0x400u) {
    bits += 112u << 23;
  } else {
    x = static_cast<float>(size) * 0x1p-24f;
    std::memcpy(&bits, &x, 4);
  }
  bits |= sign;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The nearest, ties to even; the largest in place of what is beyond.
inline uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  float x = std::min(value < 0 ? -value : value, 65504.0f);
  if (x < 0x1p-14f) return sign | static_cast<uint32_t>((x + 0.75f - 0.75f) * 0x1p24f);
  std::memcpy(&bits, &x, 4);
  bits += 0xfff + (bits >> 13 & 1);
  return sign | (bits - (112u << 23)) >> 13;
}

// set(number, byte, shift) for each number of a plane.
template <typename Set>
inline void for_plane(int numbers, int bits, int width, const Set& set) {
  for (int from = 0, byte = 0; from < numbers; from += 8 / bits * width, byte += width)
    for (int shift = 0, number = from; shift < 8; shift += bits)
      for (int i = 0; i < width; ++i) set(number++, byte + i, shift);
}

inline void unpack_scales(const BlockKind& kind, const uint8_t* p, Fields& f) {
  for (int i = 0; i < kind.numbers / kind.sub; ++i) {
    int scale = 1, minimum = -1;
    switch (kind.packing) {
      case kQ2:
        scale = p[i] & 15, minimum = p[i] >> 4;
        break;
      case kQ3:
        scale = (p[i & 7] >> (i >> 3) * 4 & 15 | (p[8 + (i & 3)] >> (i >> 2) * 2 & 3) << 4) - 32;
        break;
      case kQ4:
        scale = i < 4 ? p[i] & 63 : p[4 + i] & 15 | p[i - 4] >> 6 << 4;
        minimum = i < 4 ? p[4 + i] & 63 : p[4 + i] >> 4 | p[i] >> 6 << 4;
        break;
      case kQ6:
        scale = static_cast<int8_t>(p[i]);
        break;
      case kIq4:
        scale = (p[2 + i / 2] >> i % 2 * 4 & 15 | (p[i / 4] >> i % 4 * 2 & 3) << 4) - 32;
        break;
    }
    f.scales[i] = scale, f.minima[i] = minimum;
  }
}

// Into zeros.
inline void pack_scales(const BlockKind& kind, const Fields& f, uint8_t* p) {
  for (int i = 0; i < kind.numbers / kind.sub; ++i) {
    const int scale = f.scales[i], minimum = f.minima[i], up = scale + 32;
    switch (kind.packing) {
      case kQ2:
        p[i] = scale | minimum << 4;
        break;
      case kQ3:
        p[i & 7] |= (up & 15) << (i >> 3) * 4;
        p[8 + (i & 3)] |= up >> 4 << (i >> 2) * 2;
        break;
      case kQ4:
        if (i < 4) p[i] |= scale, p[4 + i] |= minimum;
        else p[4 + i] = scale & 15 | (minimum & 15) << 4, p[i - 4] |= scale >> 4 << 6, p[i] |= minimum >> 4 << 6;
        break;
      case kQ6:
        p[i] = static_cast<uint8_t>(scale);
        break;
      case kIq4:
        p[2 + i / 2] |= (up & 15) << i % 2 * 4;
        p[i / 4] |= up >> 4 << i % 4 * 2;
        break;
    }
  }
}

inline void unpack(const BlockKind& kind, const uint8_t* block, Fields& f) {
  std::memcpy(&f.d, block + kind.at_d, 2);
  if (kind.at_dmin >= 0) std::memcpy(&f.dmin, block + kind.at_dmin, 2);
  const int mask = (1 << kind.low_bits) - 1, flip = kind.low_bits == 8 ? 128 : 0;
  const uint8_t *low = block + kind.at_low, *high = block + kind.at_high;
  for_plane(kind.numbers, kind.low_bits, kind.low_width, [&](int number, int byte, int shift) {
    f.codes[number] = (low[byte] >> shift & mask) ^ flip;
  });
  const int more = kind.bits - kind.low_bits;
  if (more)
    for_plane(kind.numbers, more, kind.high_width, [&](int number, int byte, int shift) {
      f.codes[number] |= (high[byte] >> shift & ((1 << more) - 1)) << kind.low_bits;
    });
  unpack_scales(kind, block + kind.at_scales, f);
}

inline void pack(const BlockKind& kind, const Fields& f, uint8_t* block) {
  std::memset(block, 0, kind.size);
  std::memcpy(block + kind.at_d, &f.d, 2);
  if (kind.at_dmin >= 0) std::memcpy(block + kind.at_dmin, &f.dmin, 2);
  const int mask = (1 << kind.low_bits) - 1, flip = kind.low_bits == 8 ? 128 : 0;
  uint8_t *low = block + kind.at_low, *high = block + kind.at_high;
  for_plane(kind.numbers, kind.low_bits, kind.low_width, [&](int number, int byte, int shift) {
    low[byte] |= (f.codes[number] & mask ^ flip) << shift;
  });
  const int more = kind.bits - kind.low_bits;
  if (more)
    for_plane(kind.numbers, more, kind.high_width, [&](int number, int byte, int shift) {
      high[byte] |= f.codes[number] >> kind.low_bits << shift;
    });
  if (kind.packing) pack_scales(kind, f, block + kind.at_scales);
}
