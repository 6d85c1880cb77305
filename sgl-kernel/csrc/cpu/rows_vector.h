// Owns what is done to rows of f32 between products, on the compiler's vector types: rounding, SiLU, softmax. For one
// instruction set chosen by the including file, see gemm_vector.h. Nothing here depends on how many rows there are.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
typedef int32_t VecIU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
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

// Two vectors, one after the other.
inline void put_two(void* row, int column, VecF first, VecF second, DType dtype) {
#ifdef SGL_BATCH_TWO_TO_BF16
  if (dtype != DType::kF32) {
    typedef uint16_t Both __attribute__((vector_size(kLanes * 4)));
    typedef uint16_t BothU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
    *reinterpret_cast<BothU*>(static_cast<uint16_t*>(row) + column) = (Both)SGL_BATCH_TWO_TO_BF16(first, second);
    return;
  }
#endif
  put(row, column, first, dtype);
  put(row, column + kLanes, second, dtype);
}

// b where it is larger or smaller, else a: also where one is NaN. By the instruction, for which compilers do not always
// see that this is one.
inline VecF larger(VecF a, VecF b) {
#if defined(__x86_64__) && SGL_BATCH_LANES == 16
  return (VecF)_mm512_max_ps((__m512)b, (__m512)a);
#elif defined(__x86_64__) && SGL_BATCH_LANES == 8
  return (VecF)_mm256_max_ps((__m256)b, (__m256)a);
#else
  return b > a ? b : a;
#endif
}

inline VecF smaller(VecF a, VecF b) {
#if defined(__x86_64__) && SGL_BATCH_LANES == 16
  return (VecF)_mm512_min_ps((__m512)b, (__m512)a);
#elif defined(__x86_64__) && SGL_BATCH_LANES == 8
  return (VecF)_mm256_min_ps((__m256)b, (__m256)a);
#else
  return b < a ? b : a;
#endif
}

// 2^x for x in [-126, 127], where the polynomial of these coefficients, the highest power first, is 2^f for f in [-0.5, 0.5].
template <typename... Coefficients>
inline VecF exp2_by(VecF x, float highest, Coefficients... others) {
  const VecF shifted = x + 12582912.0f;  // 1.5 * 2^23: the nearest whole number stands in the low bits
  const VecF f = x - (shifted - 12582912.0f);
  VecF p = splat(highest);
  ((p = p * f + others), ...);
  return (VecF)((VecU)p + ((VecU)shifted << 23));
}

// Within two units of the last place; 2^0 is 1.
inline VecF exp2_within(VecF x) {
  return exp2_by(x, 1.535335855e-4f, 1.339887567e-3f, 9.618437381e-3f, 5.550332467e-2f, 2.402264791e-1f, 6.931472029e-1f, 1.0f);
}

// Within 1.1e-4 of it, for numbers that are rounded to bf16, which may change them by 2e-3; 2^0 is 1.
inline VecF exp2_coarse(VecF x) { return exp2_by(x, 5.500895e-2f, 2.4221101e-1f, 6.932829e-1f, 1.0f); }

constexpr float kLeastExponent = -126.0f;

// The same for any x, clamped to that.
inline VecF exp2_clamped(VecF x) { return exp2_within(smaller(larger(x, splat(kLeastExponent)), splat(127.0f))); }

constexpr float kLog2E = 1.44269504088896341f;

[[maybe_unused]] void store_rows(const float* from, int64_t from_stride, int rows, DType dtype, void* to, int64_t to_stride) {
  for (int i = 0; i < rows; ++i)
    for (int column = 0; column < kPanel; column += kLanes)
      put(static_cast<char*>(to) + i * to_stride, column, load(from + i * from_stride + column), dtype);
}

inline void store_scaled_row(const float* from, float factor, int64_t count, DType dtype, void* to) {
  int column = 0;
  for (; column + 2 * kLanes <= count; column += 2 * kLanes)
    put_two(to, column, load(from + column) * factor, load(from + column + kLanes) * factor, dtype);
  for (; column + kLanes <= count; column += kLanes) put(to, column, load(from + column) * factor, dtype);
  if (column == count) return;
  float rest[kLanes] = {};
  const auto some = static_cast<size_t>(count - column);
  __builtin_memcpy(rest, from + column, some * 4);
  put(rest, 0, load(rest) * factor, dtype);
  __builtin_memcpy(static_cast<char*>(to) + column * static_cast<int64_t>(size_of(dtype)), rest, some * size_of(dtype));
}

[[maybe_unused]] void store_scaled(const float* from, int64_t from_stride, const float* factors, int64_t rows, int64_t count,
                                   DType dtype, void* to) {
  const int64_t to_stride = count * static_cast<int64_t>(size_of(dtype));
  for (int64_t i = 0; i < rows; ++i)
    store_scaled_row(from + i * from_stride, factors[i], count, dtype, static_cast<char*>(to) + i * to_stride);
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
      g = smaller(g, most);  // NaN stays NaN
      u = larger(smaller(u, most), least);
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
  lanes = larger(lanes, swapped<distance>(lanes));
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

// Swaps the lanes of `a` whose number has the bit `distance` with those of `b` that lack it.
template <int distance, typename Vec>
inline void swap_lanes(Vec& a, Vec& b) {
  VecI low, high;
  for (int j = 0; j < kLanes; ++j) {
    low[j] = (j & distance) != 0 ? kLanes + j - distance : j;
    high[j] = (j & distance) != 0 ? kLanes + j : j + distance;
  }
  const Vec first = a, second = b;
  a = __builtin_shuffle(first, second, low);
  b = __builtin_shuffle(first, second, high);
}

// For each of kLanes rows what join_max or join_sum make of it, lane by lane: the same numbers meet in the same order.
template <int count, typename Join>
inline VecF join_rows(const VecF (&rows)[count], const Join& join) {
  constexpr int distance = count / 2;
  VecF joined[distance];
#pragma GCC unroll 16
  for (int i = 0; i < distance; ++i) {
    VecF a = rows[i], b = rows[i + distance];
    swap_lanes<distance>(a, b);
    joined[i] = join(a, b);
  }
  if constexpr (distance == 1)
    return joined[0];
  else
    return join_rows(joined, join);
}

constexpr int32_t kLaneNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static_assert(kLanes <= 16);

// Read from memory: compilers make a vector that is set lane by lane anew for each row.
inline VecI lane_numbers() { return *reinterpret_cast<const VecIU*>(kLaneNumbers); }

constexpr float kUnseen = -3.0e38f;

// How many of a row's first scores fill vectors whose scores all count.
inline int64_t whole_vectors(int64_t first, int64_t valid) { return first <= 0 && valid > 0 ? valid / kLanes * kLanes : 0; }

// The largest of a row's scores in [first, valid), by lane; the others, up to the width, become kUnseen.
inline VecF largest_seen(float* scores, int64_t first, int64_t valid, int64_t width) {
  VecF most = splat(kUnseen);
  int64_t i = 0;
  for (; i < whole_vectors(first, valid); i += kLanes) most = larger(most, load(scores + i));
  for (; i < width; i += kLanes) {
    const VecI at = lane_numbers() + static_cast<int32_t>(i);
    VecF found = load(scores + i);
    found = (at >= static_cast<int32_t>(first)) & (at < static_cast<int32_t>(valid)) ? found : splat(kUnseen);
    store(scores + i, found);
    most = larger(most, found);
  }
  return most;
}

// Weights of a row's scores, of which from `whole` on those of kUnseen get none; returns their sum, by lane.
template <DType kTo>
inline VecF weigh(const float* scores, int64_t whole, int64_t width, float maximum, float factor, void* weights) {
  VecF sum = {};
  const float scaled_maximum = maximum * factor;
  const auto weight = [&](int64_t i, bool is_whole) __attribute__((always_inline)) {
    const VecF score = load(scores + i);
    // One multiply-add will do for weights that are rounded to bf16.
    const VecF below = kTo == DType::kF32 ? (score - maximum) * factor : score * factor - scaled_maximum;
    const VecF exponent = larger(below, splat(kLeastExponent));
    const VecF weight = kTo == DType::kF32 ? exp2_within(exponent) : exp2_coarse(exponent);
    const VecF counted = is_whole ? weight : score <= kUnseen ? VecF{} : weight;  // NaN stays NaN
    sum += counted;
    return counted;
  };
  const auto two = [&](int64_t i, bool is_whole) __attribute__((always_inline)) {
    const VecF first = weight(i, is_whole);
    put_two(weights, static_cast<int>(i), first, weight(i + kLanes, is_whole), kTo);
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= whole; i += 2 * kLanes) two(i, true);
  for (; i < width; i += 2 * kLanes) two(i, false);
  return sum;
}

static_assert(kLanes <= kSoftmaxRoom + 1);

// The same for at most kLanes rows.
template <DType kTo>
inline void softmax_rows(const SoftmaxRows& r) {
  const float factor = r.scaling * kLog2E;
  VecF lanes[kLanes];
  int32_t seeing = 0;  // a bit for each row
  for (int i = 0; i < kLanes; ++i) {
    const bool sees = i < r.rows && r.first[i] < r.valid[i];
    lanes[i] = sees ? largest_seen(r.scores + i * r.stride, r.first[i], r.valid[i], r.width) : splat(kUnseen);
    seeing |= sees << i;
  }
  const VecI sees = (seeing >> lane_numbers() & 1) != 0;
  const VecF before = load(r.maxima), sum_before = load(r.weight_sums);
  const VecF largest = larger(before, join_rows(lanes, larger));
  const VecF shrunk = exp2_clamped((before - largest) * factor), one = splat(1.0f);
  const VecF kept = sees & (sum_before != 0.0f) ? shrunk : one;
  float maxima[kLanes], keeps[kLanes];
  store(maxima, largest);
  store(keeps, kept);
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = VecF{};
    if (i >= r.rows) continue;
    char* weights = static_cast<char*>(r.weights) + i * r.stride * static_cast<int64_t>(size_of(kTo));
    if (r.first[i] < r.valid[i])
      lanes[i] = weigh<kTo>(r.scores + i * r.stride, whole_vectors(r.first[i], r.valid[i]), r.width, maxima[i], factor, weights);
    else
      for (int64_t column = 0; column < r.width; column += kLanes) put(weights, static_cast<int>(column), VecF{}, kTo);
  }
  const VecF added = join_rows(lanes, [](VecF a, VecF b) { return a + b; });
  VecF carried = sum_before * kept;
  asm("" : "+m"(carried));  // rounded before the sum: the compiler would make one multiply-add of both
  store(r.maxima, sees ? largest : before);
  store(r.weight_sums, sees ? carried + added : sum_before);
  for (int i = 0; i < r.rows; ++i) {
    if (keeps[i] == 1.0f) continue;
    float* sums = r.sums + i * r.sums_stride;
    for (int64_t column = 0; column < r.sums_stride; column += kLanes) store(sums + column, load(sums + column) * keeps[i]);
  }
}

// Some of the rows.
inline SoftmaxRows rows_of(const SoftmaxRows& r, int first, int count) {
  SoftmaxRows some = r;
  some.rows = count;
  some.scores = r.scores + first * r.stride;
  some.first = r.first + first;
  some.valid = r.valid + first;
  some.maxima = r.maxima + first;
  some.weight_sums = r.weight_sums + first;
  some.weights = static_cast<char*>(r.weights) + first * r.stride * static_cast<int64_t>(size_of(r.dtype));
  some.sums = r.sums + first * r.sums_stride;
  return some;
}

[[maybe_unused]] void softmax_step(const SoftmaxRows& r) {
  for (int row = 0; row < r.rows; row += kLanes) {
    const SoftmaxRows some = rows_of(r, row, r.rows - row < kLanes ? r.rows - row : kLanes);
    r.dtype == DType::kF32 ? softmax_rows<DType::kF32>(some) : softmax_rows<DType::kBf16>(some);
  }
}

}  // namespace
}  // namespace sgl_batch
