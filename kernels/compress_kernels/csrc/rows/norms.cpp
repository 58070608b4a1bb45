// RMS norm and LayerNorm of rows, in fp32 inside; see rows.h.

#include <cmath>
#include <cstdint>

#include "rows.h"

// Mirrored in cpu/rows.py.
struct RmsNorm {
  Heads x, out;        // [rows, heads, width]
  const void* weight;  // [width] of `kind`, or fp32 where late
  int64_t rows, heads, width;
  float eps;
  int32_t late, kind, threads;
};

struct LayerNorm {
  Heads x, out;        // [rows, 1, width]
  const void* weight;  // [width] of `kind`
  const void* bias;    // as weight, or null
  int64_t rows, heads, width;
  float eps;
  int32_t kind, threads;
};

namespace {

// The lanes one after the other.
inline float added(Vec sums) {
  float sum = 0.0f;
  for (int i = 0; i < kRows; ++i) sum += sums[i];
  return sum;
}

template <typename T>
void norm_of(const RmsNorm& n, const T* x, T* out) {
  Vec sums{};
  for (int64_t c = 0; c < n.width; c += kRows) {
    const Vec part = load_stored(x + c, n.width - c);
    sums += part * part;
  }
  const float mean = added(sums) / static_cast<float>(n.width);
  const Vec scale = splat(1.0f / std::sqrt(mean + n.eps));
  for (int64_t c = 0; c < n.width; c += kRows) {
    const int64_t left = n.width - c;
    const Vec scaled = load_stored(x + c, left) * scale;
    const Vec y = n.late ? scaled * load_at<float>(n.weight, c, left)
                         : settled<T>(scaled) * load_at<T>(n.weight, c, left);
    store_stored(y, out + c, left);
  }
}

template <typename T>
void norm(const RmsNorm& n) {
  row_by_row(n.threads, n.rows, n.heads * n.width, [&](int64_t row) {
    for (int64_t head = 0; head < n.heads; ++head)
      norm_of(n, n.x.at<const T>(row, head), n.out.at<T>(row, head));
  });
}

// Off the mean; zeros from the `left`th number on.
template <typename T>
Vec off(const T* x, Vec mean, int64_t left) {
  Vec place;
  for (int i = 0; i < kRows; ++i) place[i] = static_cast<float>(i);
  const Vec found = load_stored(x, left) - mean;
  return place < splat(static_cast<float>(left)) ? found : Vec{};
}

template <typename T>
void centre(const LayerNorm& n, const T* x, T* out) {
  const float width = static_cast<float>(n.width);
  Vec sums{}, squares{};
  for (int64_t c = 0; c < n.width; c += kRows) sums += load_stored(x + c, n.width - c);
  const Vec mean = splat(added(sums) / width);
  for (int64_t c = 0; c < n.width; c += kRows) {
    const Vec part = off(x + c, mean, n.width - c);
    squares += part * part;
  }
  const Vec scale = splat(1.0f / std::sqrt(added(squares) / width + n.eps));
  for (int64_t c = 0; c < n.width; c += kRows) {
    const int64_t left = n.width - c;
    Vec y = off(x + c, mean, left) * scale * load_at<T>(n.weight, c, left);
    if (n.bias) y += load_at<T>(n.bias, c, left);
    store_stored(y, out + c, left);
  }
}

template <typename T>
void centred(const LayerNorm& n) {
  row_by_row(n.threads, n.rows, n.heads * n.width, [&](int64_t row) {
    for (int64_t head = 0; head < n.heads; ++head)
      centre(n, n.x.at<const T>(row, head), n.out.at<T>(row, head));
  });
}

}  // namespace

extern "C" void rms_norm(const RmsNorm* n) {
  if (n->kind == kFloat32) norm<float>(*n);
  else if (n->kind == kBFloat16) norm<BFloat16>(*n);
  else norm<Float16>(*n);
}

extern "C" void layer_norm(const LayerNorm* n) {
  if (n->kind == kFloat32) centred<float>(*n);
  else if (n->kind == kBFloat16) centred<BFloat16>(*n);
  else centred<Float16>(*n);
}
