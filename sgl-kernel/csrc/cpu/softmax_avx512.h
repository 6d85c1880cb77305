// Owns the step of a softmax whose weights need not be exact, for AVX512: they, or results by them, are rounded to bf16. Rows
// whose scores it cannot take as they come go to softmax_step of rows_vector.h.
#pragma once

#include "rows_vector.h"

namespace sgl_batch {
namespace {

// Of a row's scores this step asks for no largest one, which would take a pass over them. A weight is relative to what the
// row's maximum is already, in the first step to its first score. Floating-point weights relative to any score near the largest
// one are as exact as those relative to it, of bf16 too, which has the exponents of f32.
//
// The including file says what becomes of weights, as a type Put:
//   Number: what they are stored as
//   kRoundsToZero: whether numbers too small to be normal become 0 when they are stored
//   takes(rows): whether these are its
//   two(first, second, to, sum): stores two vectors and returns `sum` plus both as stored, by lane

constexpr int kMantissaBits = 23, kExponentOfOne = 127;
constexpr int kMantissa = (1 << kMantissaBits) - 1;
// Powers of two as fixed-point numbers whose whole part is the exponent of a float. The largest one is 2^60: neither sums of
// weights nor of values by weights overflow.
constexpr int kOnePower = 1 << kMantissaBits, kLargestPower = (kExponentOfOne + 60) << kMantissaBits;

constexpr int64_t kPair = 2 * kLanes;
static_assert(kPanel % kPair == 0);

// How many pairs of vectors a row's scores take, and which ones of the last pair count.
inline int64_t pairs_of(int64_t valid) { return (valid + kPair - 1) / kPair; }
inline uint32_t seen_of_last(int64_t valid) { return ~0u >> (-valid & (kPair - 1)); }

// Weights of rows of scores.
template <typename Put>
class CoarseWeights {
 public:
  explicit CoarseWeights(float factor)
      : factor_(_mm512_set1_ps(factor * kOnePower)), one_(_mm512_set1_ps(float{kExponentOfOne} * kOnePower)) {}

  // Those of one row relative to `reference`: of so many pairs of vectors, of which the last pair's first `seen` scores count.
  // Returns `sum` plus theirs as they are stored, by lane.
  template <int pairs>
  [[gnu::always_inline]] __m512 put(const float* scores, float reference, uint32_t seen, typename Put::Number* to, __m512 sum) {
    const __m512 offset = _mm512_fnmadd_ps(_mm512_set1_ps(reference), factor_, one_);
#pragma GCC unroll 4
    for (int i = 0; i < pairs; ++i, scores += kPair, to += kPair) {
      const uint32_t here = i + 1 < pairs ? ~0u : seen;
      const __m512i first = power(scores, here, offset), second = power(scores + kLanes, here >> kLanes, offset);
      sum = Put::two(of_power(first), of_power(second), to, sum);
    }
    return sum;
  }

  // Whether all so far are right: no score was NaN, far above its reference or so far below that its power is no normal number.
  bool are_right() const { return _mm512_cmpgt_epu32_mask(largest_, _mm512_set1_epi32(kLargestPower)) == 0; }

 private:
  // Of a vector of scores; 0 for those that do not count, whose weight is then too small to be normal.
  __m512i power(const float* scores, uint32_t seen, __m512 offset) {
    const __m512 exact = _mm512_fmadd_ps(_mm512_loadu_ps(scores), factor_, offset);
    const __m512i power = _mm512_maskz_cvtps_epi32(static_cast<__mmask16>(seen), exact);
    largest_ = _mm512_max_epu32(largest_, power);
    return power;
  }

  // The fraction of a power, seen as the mantissa m of a float, is nearly that float's: 2^(m - 1), by a polynomial which is
  // within 1.1e-4 of it and stays in [1, 2).
  static __m512 of_power(__m512i power) {
    const __m512i mantissa = _mm512_set1_epi32(kMantissa);
    const __m512 m = _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(power, mantissa, _mm512_set1_epi32(kExponentOfOne << kMantissaBits), 0xea));
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(7.8259699e-2f), m, _mm512_set1_ps(-8.45986791e-3f));
    p = _mm512_fmadd_ps(p, m, _mm512_set1_ps(0.477560818f));
    p = _mm512_fmadd_ps(p, m, _mm512_set1_ps(0.452639669f));
    // The polynomial's where the mantissa is.
    const __mmask16 kept = Put::kRoundsToZero ? 0xffff : _mm512_cmpge_epu32_mask(power, _mm512_set1_epi32(kOnePower));
    return _mm512_castsi512_ps(_mm512_maskz_ternarylogic_epi32(kept, mantissa, _mm512_castps_si512(p), power, 0xca));
  }

  const __m512 factor_, one_;
  __m512i largest_ = _mm512_setzero_si512();
};

// At most kLanes rows of so many pairs each, which all begin or none. Returns false, with nothing changed but weights, where
// these are not right.
template <typename Put, int pairs>
bool weigh_rows(const SoftmaxRows& r, bool begin) {
  CoarseWeights<Put> weights(r.scaling * kLog2E);
  const float* references = begin ? r.scores : r.maxima;
  const int64_t reference_stride = begin ? r.stride : 1;
  VecF sums[kLanes];
  for (int i = 0; i < r.rows; ++i) {
    auto* to = static_cast<typename Put::Number*>(r.weights) + i * r.stride;
    sums[i] = (VecF)weights.template put<pairs>(r.scores + i * r.stride, references[i * reference_stride],
                                                seen_of_last(r.valid[i]), to, _mm512_setzero_ps());
  }
  if (!weights.are_right()) return false;
  for (int i = r.rows; i < kLanes; ++i) sums[i] = VecF{};
  const VecF added = join_rows(sums, [](VecF a, VecF b) { return a + b; });
  store(r.weight_sums, load(r.weight_sums) + added);
  for (int i = 0; i < r.rows && begin; ++i) r.maxima[i] = r.scores[i * r.stride];
  return true;
}

// One row, of any number of pairs, likewise and with the same bits.
template <typename Put>
bool weigh_row(const SoftmaxRows& r, bool begin) {
  CoarseWeights<Put> weights(r.scaling * kLog2E);
  const float reference = begin ? r.scores[0] : r.maxima[0];
  const int64_t valid = r.valid[0];
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < valid; i += kPair)
    sum = weights.template put<1>(r.scores + i, reference, i + kPair < valid ? ~0u : seen_of_last(valid),
                                  static_cast<typename Put::Number*>(r.weights) + i, sum);
  if (!weights.are_right()) return false;
  r.maxima[0] = reference;
  r.weight_sums[0] += join_sum((VecF)sum);
  return true;
}

template <typename Put>
bool weigh_together(const SoftmaxRows& r, int64_t pairs, bool begin) {
  switch (pairs) {
    case 1: return weigh_rows<Put, 1>(r, begin);
    case 2: return weigh_rows<Put, 2>(r, begin);
    case 3: return weigh_rows<Put, 3>(r, begin);
    case 4: return weigh_rows<Put, 4>(r, begin);
    default: return false;
  }
}

// How many rows from the first one on, at most kLanes, have as many pairs, and are or are not seen from their first score, as it
// is.
inline int count_alike(const SoftmaxRows& r) {
  constexpr int kHalf = kLanes / 2;
  const uint32_t all = r.rows < kLanes ? (1u << r.rows) - 1 : (1u << kLanes) - 1;
  const int64_t most = pairs_of(r.valid[0]) * kPair;
  const __m512i zero = _mm512_setzero_si512();
  uint32_t alike = 0, hidden = 0;
  for (int i = 0; i < 2; ++i) {
    const auto mask = static_cast<__mmask8>(all >> i * kHalf);
    const __m512i valid = _mm512_maskz_loadu_epi64(mask, r.valid + i * kHalf);
    const uint32_t has = _mm512_mask_cmple_epi64_mask(_mm512_cmpgt_epi64_mask(valid, _mm512_set1_epi64(most - kPair)), valid,
                                                      _mm512_set1_epi64(most));
    const uint32_t later = _mm512_cmpgt_epi64_mask(_mm512_maskz_loadu_epi64(mask, r.first + i * kHalf), zero);
    alike |= has << i * kHalf;
    hidden |= later << i * kHalf;
  }
  alike &= (hidden & 1) != 0 ? hidden : ~hidden;
  return __builtin_ctz(~(alike & all));
}

// See SoftmaxRows. Rows that follow one another are taken together where they are alike.
template <typename Put>
void coarse_softmax_step(const SoftmaxRows& r) {
  if (!Put::takes(r)) return softmax_step(r);
  for (SoftmaxRows left = r; left.rows > 0;) {
    const SoftmaxRows some = rows_of(left, 0, count_alike(left));
    left = rows_of(left, some.rows, left.rows - some.rows);
    const int64_t pairs = pairs_of(some.valid[0]);
    const bool is_whole = some.first[0] <= 0 && pairs > 0;
    const uint32_t all = (1u << some.rows) - 1;
    const uint32_t begin = _mm512_cmpeq_ps_mask(_mm512_loadu_ps(some.weight_sums), _mm512_setzero_ps()) & all;
    const bool is_done = is_whole && (begin == 0 || begin == all) && weigh_together<Put>(some, pairs, begin != 0);
    for (int i = 0; i < some.rows && !is_done; ++i) {
      const SoftmaxRows one = rows_of(some, i, 1);
      if (!is_whole || !weigh_row<Put>(one, (begin >> i & 1) != 0)) softmax_step(one);
    }
    for (int64_t at = pairs * kPair; at < some.width; at += kPair)
      for (int i = 0; i < some.rows; ++i)
        Put::two(_mm512_setzero_ps(), _mm512_setzero_ps(), static_cast<typename Put::Number*>(some.weights) + i * some.stride + at,
                 _mm512_setzero_ps());
  }
}

}  // namespace
}  // namespace sgl_batch
