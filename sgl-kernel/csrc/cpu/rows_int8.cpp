#include "rows_int8.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "clones.h"
#include "rows.h"
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
SGL_BATCH_CLONES int32_t divide_run(const float* row, int64_t k, float scale, int8_t* to) {
  return divided(row, k, scale, to);
}
SGL_BATCH_CLONES int32_t divide_run(const uint16_t* row, int64_t k, float scale, int8_t* to) {
  return divided(row, k, scale, to);
}

template <typename Number>
int32_t divide_row(const Number* row, int64_t k, float scale, int8_t* to, int64_t block) {
  const int64_t run = block == kRowBytes ? std::max(k, kRowBytes) : kRowBytes;  // what lies in one piece
  int32_t sum = 0;
  for (int64_t first = 0; first < k; first += run, to += block)
    sum += divide_run(row + first, std::min(run, k - first), scale, to);
  return sum;
}

// Sums and shifts may pass the ends of int32, what they make does not.
inline __attribute__((always_inline)) float shifted(int32_t sum, uint32_t shift) {
  return static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(sum) + shift));
}

// Indices of 64 bits: of 32 they could go around, and the loop would not become vectors.
SGL_BATCH_CLONES void scale_row(const int32_t* __restrict sums, int32_t row_shift, float row_scale,
                                const float* __restrict columns, float* __restrict to, int64_t width) {
  const auto shift = static_cast<uint32_t>(row_shift);
  for (int64_t j = 0; j < width; ++j) to[j] = shifted(sums[j], shift) * row_scale * columns[j];
}

SGL_BATCH_CLONES void scale_panel(const int32_t* __restrict sums, int64_t rows, const int32_t* __restrict row_shifts,
                                  const float* __restrict row_scales, const float* __restrict columns, float* __restrict to,
                                  int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    const auto shift = static_cast<uint32_t>(row_shifts[i]);
    const float row_scale = row_scales[i];
    const int32_t* __restrict from = sums + i * kPanel;
    float* __restrict row = to + i * stride;
    for (int64_t j = 0; j < kPanel; ++j) row[j] = shifted(from[j], shift) * row_scale * columns[j];
  }
}

// Zeros from the given number on to the end of its kRowBytes.
void fill_up(const Int8Rows& to, int64_t index, int64_t from) {
  const int64_t filled = from % kRowBytes;
  if (filled > 0) std::memset(to.at(index, from) + filled, 0, static_cast<size_t>(kRowBytes - filled));
}

void round_numbers(const void* row, DType dtype, const Int8Rows& to, int64_t index) {
  const uint32_t most = dtype == DType::kF32 ? largest_bits(static_cast<const float*>(row), to.k)
                                             : largest_bits(static_cast<const uint16_t*>(row), to.k);
  if (most >= kInfinity) {
    for (int64_t k = 0; k < to.k; k += kRowBytes) std::memset(to.at(index, k), 0, kRowBytes);
    to.scales[index] = std::numeric_limits<float>::quiet_NaN();
    to.shifts[index] = 0;
    return;
  }
  // Of numbers so small that their scale would be nothing, too, nothing is left.
  const float share = __builtin_bit_cast(float, most) / static_cast<float>(kLargest),
              scale = share == 0.0f ? 1.0f : share;
  const int32_t sum = int8_kernel().divide(row, dtype, to.k, scale, to.at(index), to.layout.block);
  to.shifts[index] = -kUnsignedShift * sum;
  to.scales[index] = scale;
  fill_up(to, index, to.k);
}

}  // namespace

int32_t divide_plainly(const void* row, DType dtype, int64_t k, float scale, int8_t* to, int64_t block) {
  if (dtype == DType::kF32) return divide_row(static_cast<const float*>(row), k, scale, to, block);
  return divide_row(static_cast<const uint16_t*>(row), k, scale, to, block);
}

void Int8Rows::copy(int64_t from, const Int8Rows& to, int64_t index) const {
  spread_row(to.at(index), to.layout.block, at(from), round_up(k, kRowBytes));
  to.scales[index] = scales[from];
  to.shifts[index] = shifts[from];
}

void round_row(const float* row, const Int8Rows& to, int64_t index) { round_numbers(row, DType::kF32, to, index); }

void round_rows(const void* rows, DType dtype, int64_t stride, int64_t count, const Int8Rows& to) {
  constexpr int64_t kRowsPerTask = 16;
  run_tasks(divide_up(count, kRowsPerTask), [&](int64_t task, int) {
    for (int64_t i = task * kRowsPerTask; i < std::min(count, (task + 1) * kRowsPerTask); ++i)
      round_numbers(static_cast<const char*>(rows) + i * stride, dtype, to, i);
  });
}

void scale_sums(const int32_t* sums, int rows, int64_t width, const Scaling& by, float* to, int64_t stride) {
  if (width == kPanel)
    scale_panel(sums, rows, by.row_shifts, by.row_scales, by.column_scales, to, stride);
  else
    for (int64_t i = 0; i < rows; ++i)
      scale_row(sums + i * kPanel, by.row_shifts[i], by.row_scales[i], by.column_scales, to + i * stride, width);
}

}  // namespace sgl_batch
