// How rows become int8 with AVX512, all but without divisions, which take longer than all else.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#include <immintrin.h>

#include <cmath>

#include "gemm_int8.h"

namespace sgl_batch {
namespace {

constexpr int kLanes = 16, kVectors = kRowBytes / kLanes;
// A number times the scale's inverse, at most 127, is off its quotient by less than 2^-15: both round to the same whole number
// where they are not so near to a half.
constexpr float kNotNearHalf = 0.5f - 0x1p-14f;
// Beyond, the inverse or what is multiplied with it is not normal.
constexpr float kLeastScale = 0x1p-100f, kMostScale = 0x1p100f;
constexpr int kLargest = 127;

inline __m512 numbers(const float* row, __mmask16 there) { return _mm512_maskz_loadu_ps(there, row); }
inline __m512 numbers(const uint16_t* row, __mmask16 there) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, row)), 16));
}

inline __m512i divided(__m512 row, __m512 scale) {
  const __m512i rounded = _mm512_cvtps_epi32(_mm512_div_ps(row, scale));
  return _mm512_max_epi32(_mm512_min_epi32(rounded, _mm512_set1_epi32(kLargest)), _mm512_set1_epi32(-kLargest));
}

template <typename Number>
int32_t divide(const Number* row, int64_t k, float scale, int8_t* to, int64_t block) {
  const __m512 scales = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1.0f / scale);
  const bool usual = scale > kLeastScale && scale < kMostScale;
  __m512i sums = _mm512_setzero_si512();
  for (; k > 0; k -= kRowBytes, row += kRowBytes, to += block) {
    const uint64_t there = k >= kRowBytes ? ~uint64_t{0} : (uint64_t{1} << k) - 1;
    __m512 exact[kVectors];
    __m512i rounded[kVectors];
    __mmask16 near = usual ? 0 : 1;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      exact[v] = numbers(row + v * kLanes, static_cast<__mmask16>(there >> v * kLanes));
      const __m512 quotient = _mm512_mul_ps(exact[v], inverse);
      rounded[v] = _mm512_cvtps_epi32(quotient);
      const __m512 off = _mm512_abs_ps(_mm512_sub_ps(quotient, _mm512_cvtepi32_ps(rounded[v])));
      near |= _mm512_cmp_ps_mask(off, _mm512_set1_ps(kNotNearHalf), _CMP_GT_OQ);
    }
    if (near != 0) [[unlikely]]
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) rounded[v] = divided(exact[v], scales);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums = _mm512_add_epi32(sums, rounded[v]);
      _mm512_mask_cvtepi32_storeu_epi8(to + v * kLanes, static_cast<__mmask16>(there >> v * kLanes), rounded[v]);
    }
  }
  return _mm512_reduce_add_epi32(sums);
}

}  // namespace

int32_t divide_avx512(const void* row, DType dtype, int64_t k, float scale, int8_t* to, int64_t block) {
  if (dtype == DType::kF32) return divide(static_cast<const float*>(row), k, scale, to, block);
  return divide(static_cast<const uint16_t*>(row), k, scale, to, block);
}
}  // namespace sgl_batch
#endif
