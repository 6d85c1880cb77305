// Owns what is done to rows of f32 between products, on the compiler's vector types: rounding, SiLU, softmax. For one
// instruction set chosen by the including file, see gemm_vector.h. Nothing here depends on how many rows there are.
#pragma once

#include "gemm.h"

namespace sgl_batch {
namespace {

constexpr int kLanes = SGL_BATCH_LANES;

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));
typedef float VecFU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef uint32_t VecUU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef uint16_t VecHU __attribute__((vector_size(kLanes * 2), aligned(1), may_alias));

inline VecF load(const float* from) { return *reinterpret_cast<const VecFU*>(from); }
inline void store(float* to, VecF value) { *reinterpret_cast<VecFU*>(to) = value; }
inline VecF splat(float value) { return value - VecF{}; }

#ifdef SGL_BATCH_TO_BF16
// By the instruction, for which numbers too small to be normal count as zero, as they do in its products.
inline VecH to_bf16(VecF value) { return (VecH)SGL_BATCH_TO_BF16(value); }
#else
// As f32_to_bf16, into the low halves.
inline VecH to_bf16(VecF value) {
  const VecU bits = (VecU)value;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, VecH);
}
#endif

inline void put(void* row, int column, VecF value, DType dtype) {
  if (dtype == DType::kF32)
    store(static_cast<float*>(row) + column, value);
  else
    *reinterpret_cast<VecHU*>(static_cast<uint16_t*>(row) + column) = to_bf16(value);
}

// 2^x for x in [-126, 127], clamped to that; within two units of the last place, and 2^0 is 1.
inline VecF exp2_clamped(VecF x) {
  const VecF least = splat(-126.0f), most = splat(127.0f);
  x = x < least ? least : x;
  x = x > most ? most : x;
  const VecF shifted = x + 12582912.0f;  // 1.5 * 2^23: the nearest whole number stands in the low bits
  const VecF f = x - (shifted - 12582912.0f);
  VecF p = splat(1.535335855e-4f);
  p = p * f + 1.339887567e-3f;
  p = p * f + 9.618437381e-3f;
  p = p * f + 5.550332467e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472029e-1f;
  p = p * f + 1.0f;
  return (VecF)((VecU)p + ((VecU)shifted << 23));
}

constexpr float kLog2E = 1.44269504088896341f;

[[maybe_unused]] void store_rows(const float* from, int64_t from_stride, int rows, DType dtype, void* to, int64_t to_stride) {
  for (int i = 0; i < rows; ++i)
    for (int column = 0; column < kPanel; column += kLanes)
      put(static_cast<char*>(to) + i * to_stride, column, load(from + i * from_stride + column), dtype);
}

[[maybe_unused]] void silu_mul(const float* gate, const float* up, int rows, DType dtype, void* to, int64_t to_stride) {
  for (int i = 0; i < rows; ++i)
    for (int column = 0; column < kPanel; column += kLanes) {
      const VecF g = load(gate + i * kPanel + column);
      const VecF mixed = g / (1.0f + exp2_clamped(g * -kLog2E)) * load(up + i * kPanel + column);
      put(static_cast<char*>(to) + i * to_stride, column, mixed, dtype);
    }
}

[[maybe_unused]] void clamped_mul(const float* gate, const float* up, int rows, float alpha, float limit, DType dtype, void* to,
                                  int64_t to_stride) {
  const VecF most = splat(limit), least = splat(-limit);
  for (int i = 0; i < rows; ++i)
    for (int column = 0; column < kPanel; column += kLanes) {
      VecF g = load(gate + i * kPanel + column), u = load(up + i * kPanel + column);
      g = g > most ? most : g;  // NaN stays NaN
      u = u > most ? most : u;
      u = u < least ? least : u;
      const VecF mixed = g / (1.0f + exp2_clamped(g * (-kLog2E * alpha))) * (u + 1.0f);
      put(static_cast<char*>(to) + i * to_stride, column, mixed, dtype);
    }
}

[[maybe_unused]] void scale_columns(float* c, int64_t c_stride, int rows, const float* scales) {
  for (int i = 0; i < rows; ++i)
    for (int column = 0; column < kPanel; column += kLanes) {
      float* at = c + i * c_stride + column;
      store(at, load(at) * load(scales + column));
    }
}

// Pairs of int8: the first ones of the pairs and the second ones.
struct Pairs {
  explicit Pairs(const int8_t* from) {
    const VecU pairs = __builtin_convertvector(*reinterpret_cast<const VecHU*>(from), VecU);
    first = __builtin_convertvector((VecI)(pairs << 24) >> 24, VecF);
    second = __builtin_convertvector((VecI)(pairs << 16) >> 24, VecF);
  }
  // As pairs of bf16: whole numbers up to 127 need no rounding.
  VecU bf16() const { return (VecU)first >> 16 | ((VecU)second & 0xffff0000u); }

  VecF first, second;
};

[[maybe_unused]] void widen(const int8_t* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) *reinterpret_cast<VecUU*>(to + i) = Pairs(from + i).bf16();
  for (; i < count; ++i) to[i] = f32_to_bf16(from[i]);
}

// Lane j of the result is lane j ^ distance.
template <int distance>
inline VecF swapped(VecF lanes) {
  VecI from;
  for (int j = 0; j < kLanes; ++j) from[j] = j ^ distance;
  return __builtin_shuffle(lanes, from);
}

template <int distance = kLanes / 2>
inline float join_max(VecF lanes) {
  const VecF other = swapped<distance>(lanes);
  lanes = other > lanes ? other : lanes;
  if constexpr (distance == 1)
    return lanes[0];
  else
    return join_max<distance / 2>(lanes);
}

template <int distance = kLanes / 2>
inline float join_sum(VecF lanes) {
  lanes += swapped<distance>(lanes);
  if constexpr (distance == 1)
    return lanes[0];
  else
    return join_sum<distance / 2>(lanes);
}

constexpr float kUnseen = -3.0e38f;

// The largest of a row's scores in [first, valid); the others, up to the width, become kUnseen.
inline float largest_seen(float* scores, int64_t first, int64_t valid, int64_t width) {
  VecF most = splat(kUnseen);
  if (first <= 0 && valid >= width) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const VecF found = load(scores + i);
      most = found > most ? found : most;
    }
    return join_max(most);
  }
  VecI at;
  for (int j = 0; j < kLanes; ++j) at[j] = j;
  const VecI from = VecI{} + static_cast<int32_t>(first), to = VecI{} + static_cast<int32_t>(valid);
  for (int64_t i = 0; i < width; i += kLanes, at += kLanes) {
    VecF found = load(scores + i);
    found = (at >= from) & (at < to) ? found : splat(kUnseen);
    store(scores + i, found);
    most = found > most ? found : most;
  }
  return join_max(most);
}

// Weights of a row of scores, of which those of kUnseen get none; returns their sum.
inline float weigh(const float* scores, int64_t width, float maximum, float factor, DType dtype, void* weights) {
  VecF sum = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const VecF score = load(scores + i);
    const VecF weight = score <= kUnseen ? VecF{} : exp2_clamped((score - maximum) * factor);  // NaN stays NaN
    sum += weight;
    put(weights, static_cast<int>(i), weight, dtype);
  }
  return join_sum(sum);
}

[[maybe_unused]] void softmax_step(const SoftmaxRows& r) {
  const float factor = r.scaling * kLog2E;
  float shrunk[kMaxRows] = {}, maxima[kMaxRows];
  for (int i = 0; i < r.rows; ++i) {
    const float most = r.first[i] < r.valid[i] ? largest_seen(r.scores + i * r.stride, r.first[i], r.valid[i], r.width) : kUnseen;
    maxima[i] = most > r.state[2 * i] ? most : r.state[2 * i];
    shrunk[i] = (r.state[2 * i] - maxima[i]) * factor;
  }
  for (int i = 0; i < r.rows; i += kLanes) store(shrunk + i, exp2_clamped(load(shrunk + i)));
  for (int i = 0; i < r.rows; ++i) {
    float* state = r.state + 2 * i;
    char* weights = static_cast<char*>(r.weights) + i * r.stride * static_cast<int64_t>(size_of(r.dtype));
    if (r.first[i] >= r.valid[i]) {
      for (int64_t column = 0; column < r.width; column += kLanes) put(weights, static_cast<int>(column), VecF{}, r.dtype);
      continue;
    }
    const float kept = state[1] == 0.0f ? 1.0f : shrunk[i];
    state[0] = maxima[i];
    state[1] = state[1] * kept + weigh(r.scores + i * r.stride, r.width, maxima[i], factor, r.dtype, weights);
    if (kept == 1.0f) continue;
    float* sums = r.sums + i * r.sums_stride;
    for (int64_t column = 0; column < r.sums_stride; column += kLanes) store(sums + column, load(sums + column) * kept);
  }
}

}  // namespace
}  // namespace sgl_batch
