#include "rows_int8.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "clones.h"
#include "tasks.h"

namespace sgl_batch {
namespace {

constexpr int32_t kLargest = 127;
constexpr float kNearest = 12582912.0f;  // 1.5 * 2^23: added, the nearest whole number stands in the low bits
constexpr uint32_t kNearestBits = 0x4b400000u;
constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;

inline __attribute__((always_inline)) float exact(float number) { return number; }
inline __attribute__((always_inline)) float exact(uint16_t number) { return bf16_to_f32(number); }

// The bits of the largest magnitude; those of what is not finite are above all others.
template <typename Number>
inline __attribute__((always_inline)) uint32_t largest_bits_of(const Number* row, int64_t k) {
  uint32_t most = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, exact(row[i])) & kMagnitude;
    most = bits > most ? bits : most;
  }
  return most;
}

// Returns the sum of what it writes.
template <typename Number>
inline __attribute__((always_inline)) int32_t divided(const Number* __restrict row, int64_t k, float scale,
                                                      int8_t* __restrict to) {
  int32_t sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    // Beyond the largest only where the scale is so small that it is not exact.
    auto rounded = static_cast<int32_t>(__builtin_bit_cast(uint32_t, exact(row[i]) / scale + kNearest) - kNearestBits);
    rounded = rounded > kLargest ? kLargest : rounded;
    rounded = rounded < -kLargest ? -kLargest : rounded;
    to[i] = static_cast<int8_t>(rounded);
    sum += rounded;
  }
  return sum;
}

SGL_BATCH_CLONES uint32_t largest_bits(const float* row, int64_t k) { return largest_bits_of(row, k); }
SGL_BATCH_CLONES uint32_t largest_bits(const uint16_t* row, int64_t k) { return largest_bits_of(row, k); }
SGL_BATCH_CLONES int32_t divide_row(const float* row, int64_t k, float scale, int8_t* to) {
  return divided(row, k, scale, to);
}
SGL_BATCH_CLONES int32_t divide_row(const uint16_t* row, int64_t k, float scale, int8_t* to) {
  return divided(row, k, scale, to);
}

// Indices of 64 bits: of 32 they could go around, and the loop would not become vectors.
SGL_BATCH_CLONES void scale_row(const int32_t* __restrict sums, float row_scale, const float* __restrict columns,
                                float* __restrict to, int64_t width) {
  for (int64_t j = 0; j < width; ++j) to[j] = static_cast<float>(sums[j]) * row_scale * columns[j];
}

SGL_BATCH_CLONES void scale_panel(const int32_t* __restrict sums, int64_t rows, const float* __restrict row_scales,
                                  const float* __restrict columns, float* __restrict to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    const float row_scale = row_scales[i];
    const int32_t* __restrict from = sums + i * kPanel;
    float* __restrict row = to + i * stride;
    for (int64_t j = 0; j < kPanel; ++j) row[j] = static_cast<float>(from[j]) * row_scale * columns[j];
  }
}

template <typename Number>
void round_numbers(const Number* row, int64_t k, const Int8Rows& to, int64_t index) {
  int8_t* rounded = to.row(index);
  const uint32_t most = largest_bits(row, k);
  if (most >= kInfinity) {
    std::memset(rounded, 0, static_cast<size_t>(to.stride));
    to.scales[index] = std::numeric_limits<float>::quiet_NaN();
    to.starts[index] = 0;
    return;
  }
  // Of numbers so small that their scale would be nothing, too, nothing is left.
  const float share = __builtin_bit_cast(float, most) / static_cast<float>(kLargest),
              scale = share == 0.0f ? 1.0f : share;
  to.starts[index] = -kUnsignedShift * divide_row(row, k, scale, rounded);
  to.scales[index] = scale;
  std::memset(rounded + k, 0, static_cast<size_t>(to.stride - k));
}

}  // namespace

void Int8Rows::copy(int64_t from, const Int8Rows& to, int64_t index) const {
  std::memcpy(to.row(index), row(from), static_cast<size_t>(stride));
  to.scales[index] = scales[from];
  to.starts[index] = starts[from];
}

void round_row(const float* row, int64_t k, const Int8Rows& to, int64_t index) { round_numbers(row, k, to, index); }

void round_rows(const void* rows, DType dtype, int64_t stride, int64_t count, int64_t k, const Int8Rows& to) {
  constexpr int64_t kRowsPerTask = 16;
  run_tasks(divide_up(count, kRowsPerTask), [&](int64_t task, int) {
    for (int64_t i = task * kRowsPerTask; i < std::min(count, (task + 1) * kRowsPerTask); ++i) {
      const char* row = static_cast<const char*>(rows) + i * stride;
      if (dtype == DType::kF32)
        round_numbers(reinterpret_cast<const float*>(row), k, to, i);
      else
        round_numbers(reinterpret_cast<const uint16_t*>(row), k, to, i);
    }
  });
}

void scale_sums(const int32_t* sums, int rows, int64_t width, const Scaling& by, float* to, int64_t stride) {
  if (width == kPanel)
    scale_panel(sums, rows, by.rows, by.columns, to, stride);
  else
    for (int64_t i = 0; i < rows; ++i) scale_row(sums + i * kPanel, by.rows[i], by.columns, to + i * stride, width);
}

}  // namespace sgl_batch
