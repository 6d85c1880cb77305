// Owns taking integers of eight bits to bf16 on the compiler's vector types, for one instruction set chosen by the including file,
// see gemm_vector.h and int8_groups.h.
#pragma once

#include "coded_vector.h"
#include "int8_groups.h"

namespace sgl_batch {
namespace {

constexpr int64_t kInt8PairBytes = 2 * kPanel;  // of codes of two k

// The scales of kPanel columns, in the order of numbers: each column's twice.
struct Int8Scales {
  static constexpr int kParts = 2 * kPanel / kLanes;

  explicit Int8Scales(const float* given) {
#if SGL_BATCH_LANES == 16
    for (int part = 0; part < kParts; ++part) scales[part] = twice(load(given + part / 2 * kLanes), part % 2);
#else
    for (int number = 0; number < 2 * kPanel; ++number) reinterpret_cast<float*>(scales)[number] = given[number / 2];
#endif
  }
  // The numbers of a vector of codes.
  [[gnu::always_inline]] VecF exact(const int8_t* codes, int part) const {
#if SGL_BATCH_LANES == 16
    const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + part * kLanes));
    return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(own)) * scales[part];
#else
    VecI integers;
    for (int i = 0; i < kLanes; ++i) integers[i] = codes[part * kLanes + i];
    return __builtin_convertvector(integers, VecF) * scales[part];
#endif
  }
#if SGL_BATCH_LANES == 16
  // The numbers of two pairs of k, whose codes begin there.
  [[gnu::always_inline]] void all(const void* from, VecW (&weights)[4]) const {
    const auto* codes = static_cast<const int8_t*>(from);
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) {
      const int8_t* const pair = codes + group / 2 * kInt8PairBytes;
      weights[group] = two_to_bf16(exact(pair, group % 2 * 2), exact(pair, group % 2 * 2 + 1));
    }
  }
#endif

  VecF scales[kParts];
};

// So many k, whole blocks of kInt8BlockK, whose scales and codes begin there, to a panel of bf16. They begin with a group, or lie
// within one.
void decode_int8_groups(const float* scales, const void* codes, int64_t k, int64_t group, uint16_t* to) {
  const auto* from = static_cast<const int8_t*>(codes);
  for (int64_t first = 0; first < k; first += group, scales += kPanel) {
    const Int8Scales own(scales);
    const int64_t count = k - first < group ? k - first : group;
    for (int64_t i = 0; i < count; i += 2, from += kInt8PairBytes, to += kInt8PairBytes)
#pragma GCC unroll 16
      for (int part = 0; part < Int8Scales::kParts; ++part)
        *reinterpret_cast<VecHU*>(to + part * kLanes) = to_bf16(own.exact(from, part));
  }
}

}  // namespace
}  // namespace sgl_batch
