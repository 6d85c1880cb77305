// Owns RMS norm and rotary embedding of rows on the compiler's vector types, for one instruction set chosen by the
// including file, see gemm_vector.h. Which rows, and on which thread, is decided by norm_rope.cpp.
#pragma once

#include "rows_vector.h"

namespace sgl_batch {
namespace {

constexpr int kSums = 16;  // partial sums of a row, one for each index modulo sixteen

inline VecF get(const void* row, int64_t column, DType dtype) {
  if (dtype == DType::kF32) return load(static_cast<const float*>(row) + column);
  const VecH bits = *reinterpret_cast<const VecHU*>(static_cast<const uint16_t*>(row) + column);
  return (VecF)(__builtin_convertvector(bits, VecU) << 16);
}

inline float get_one(const void* row, int64_t column, DType dtype) {
  return dtype == DType::kF32 ? static_cast<const float*>(row)[column]
                              : bf16_to_f32(static_cast<const uint16_t*>(row)[column]);
}

inline void put_one(void* row, int64_t column, float value, DType dtype) {
  if (dtype == DType::kF32)
    static_cast<float*>(row)[column] = value;
  else
    static_cast<uint16_t*>(row)[column] = f32_to_bf16(value);
}

inline float sum_up(const float (&sums)[kSums]) {
  float sum = 0;
  for (int j = 0; j < kSums; ++j) sum += sums[j];
  return sum;
}

inline float norm_factor(float sum, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps);
}

// x (+ residual, which goes to residual_out rounded) into `row`; returns the sum of its squares.
inline float sum_row(const NormRow& r, int64_t width, DType dtype, float* row) {
  float sums[kSums] = {};
  VecF partial[kSums / kLanes] = {};
  const int64_t whole = width / kSums * kSums;
  for (int64_t i = 0; i < whole; i += kSums)
#pragma GCC unroll 4
    for (int j = 0; j < kSums / kLanes; ++j) {
      const int64_t at = i + j * kLanes;
      VecF h = get(r.x, at, dtype);
      if (r.residual != nullptr) {
        h += get(r.residual, at, dtype);
        put(r.residual_out, static_cast<int>(at), h, dtype);
      }
      store(row + at, h);
      partial[j] += h * h;
    }
  for (int j = 0; j < kSums / kLanes; ++j) store(sums + j * kLanes, partial[j]);
  for (int64_t i = whole; i < width; ++i) {
    row[i] = get_one(r.x, i, dtype);
    if (r.residual != nullptr) {
      row[i] += get_one(r.residual, i, dtype);
      put_one(r.residual_out, i, row[i], dtype);
    }
    sums[i - whole] += row[i] * row[i];
  }
  return sum_up(sums);
}

void norm_row(const NormRow& r, const float* weight, float eps, int64_t width, DType dtype, float* row) {
  const float factor = norm_factor(sum_row(r, width, dtype, row), width, eps);
  const int64_t whole = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    put(r.out, static_cast<int>(i), load(row + i) * factor * load(weight + i), dtype);
  for (int64_t i = whole; i < width; ++i) put_one(r.out, i, row[i] * factor * weight[i], dtype);
}

void rotate_head(void* head, const float* cosine, const float* sine, int64_t half, bool neox, DType dtype) {
  const int64_t whole = neox ? half / kLanes * kLanes : 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const VecF a = get(head, i, dtype), b = get(head, half + i, dtype);
    const VecF c = load(cosine + i), s = load(sine + i);
    put(head, static_cast<int>(i), a * c - b * s, dtype);
    put(head, static_cast<int>(half + i), b * c + a * s, dtype);
  }
  for (int64_t i = whole; i < half; ++i) {
    const int64_t low = neox ? i : 2 * i, high = neox ? half + i : 2 * i + 1;
    const float a = get_one(head, low, dtype), b = get_one(head, high, dtype);
    put_one(head, low, a * cosine[i] - b * sine[i], dtype);
    put_one(head, high, b * cosine[i] + a * sine[i], dtype);
  }
}

// Of the usual heads, which are turned as a whole: they stay in registers from the first step to the last.
template <int width>
inline void norm_rotate_whole(uint16_t* head, const NormRotate& c) {
  constexpr int kVectors = width / kLanes, kHalf = kVectors / 2, kPartial = kSums / kLanes;
  VecF h[kVectors], partial[kPartial] = {};
#pragma GCC unroll 32
  for (int i = 0; i < kVectors; ++i) {
    h[i] = get(head, i * kLanes, DType::kBf16);
    partial[i % kPartial] += h[i] * h[i];
  }
  float sums[kSums];
#pragma GCC unroll 4
  for (int j = 0; j < kPartial; ++j) store(sums + j * kLanes, partial[j]);
  const float factor = norm_factor(sum_up(sums), width, c.eps);
#pragma GCC unroll 32
  for (int i = 0; i < kVectors; ++i)
    h[i] = (VecF)(__builtin_convertvector(to_bf16(h[i] * factor * load(c.weight + i * kLanes)), VecU) << 16);
#pragma GCC unroll 16
  for (int i = 0; i < kHalf; ++i) {
    const VecF cosine = load(c.cosine + i * kLanes), sine = load(c.sine + i * kLanes);
    put(head, i * kLanes, h[i] * cosine - h[kHalf + i] * sine, DType::kBf16);
    put(head, (kHalf + i) * kLanes, h[kHalf + i] * cosine + h[i] * sine, DType::kBf16);
  }
}

void norm_rotate_heads(void* heads, int64_t count, const NormRotate& c, float* row) {
  const bool whole = c.neox && c.dtype == DType::kBf16 && 2 * c.half == c.width;
  const int64_t bytes = c.width * static_cast<int64_t>(size_of(c.dtype));
  for (auto* head = static_cast<char*>(heads); count > 0; --count, head += bytes)
    if (whole && c.width == 64) {
      norm_rotate_whole<64>(reinterpret_cast<uint16_t*>(head), c);
    } else if (whole && c.width == 128) {
      norm_rotate_whole<128>(reinterpret_cast<uint16_t*>(head), c);
    } else {
      norm_row({head, nullptr, nullptr, head}, c.weight, c.eps, c.width, c.dtype, row);
      rotate_head(head, c.cosine, c.sine, c.half, c.neox, c.dtype);
    }
}

}  // namespace
}  // namespace sgl_batch
