// Owns taking integers of four bits to bf16 on the compiler's vector types, for one instruction set chosen by the including file,
// see gemm_vector.h and int4.h.
#pragma once

#include "coded_vector.h"
#include "int4.h"

namespace sgl_batch {
namespace {

// A panel's words of 32 bits for kInt4WordK of k.
constexpr int64_t kInt4Words = kPanel / 2;
// A word's code stands beside 2^e in f32, e the second of these for codes of the second vector of a group's numbers. Times a scale of
// 12 bits both are exact, and what is left when 2^e and the zero point are taken away is so, too.
constexpr float kInt4Beside[2] = {2048.0f, 128.0f};

// What makes numbers of codes for kPanel columns, in the order of numbers: each column's twice.
struct Int4Scales {
  static constexpr int kParts = kPanel / kLanes;  // vectors of kPanel numbers

  Int4Scales() = default;
  explicit Int4Scales(const uint32_t* words) {
#if SGL_BATCH_LANES == 16
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    for (int half = 0; half < 2; ++half) {
      const VecU own = *reinterpret_cast<const VecUU*>(words + half * kLanes);
      const VecF scale = (VecF)(own & kInt4Scale), zero = __builtin_convertvector((VecI)(own & kInt4Zero), VecF);
      for (int part = 0; part < kParts; ++part) {
        const __m512i lanes = _mm512_add_epi32(twice, _mm512_set1_epi32(kLanes / 2 * part));
        scales[half][part] = (VecF)_mm512_permutexvar_ps(lanes, (__m512)scale);
        addends[half][part] = (VecF)_mm512_permutexvar_ps(lanes, (__m512)(-scale * (zero + kInt4Beside[part])));
      }
    }
#else
    for (int number = 0; number < 2 * kPanel; ++number) {
      const uint32_t word = words[number / 2], bits = word & kInt4Scale;
      float scale;
      __builtin_memcpy(&scale, &bits, 4);
      reinterpret_cast<float*>(scales)[number] = scale;
      reinterpret_cast<float*>(addends)[number] = -scale * static_cast<float>(word & kInt4Zero);
    }
#endif
  }

  VecF scales[2][kParts], addends[2][kParts];
};

#if SGL_BATCH_LANES == 16
// A group's numbers of kInt4Words words.
inline VecW int4_numbers(VecU codes, int group, const Int4Scales& own) {
  const VecU placed = group == 0 ? codes << 12 : group == 1 ? codes << 4 : group == 2 ? codes >> 4 : codes >> 12;
  VecF numbers[2];
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
    const VecF beside = (VecF)((placed & (15u << (12 + 4 * part))) | (VecU)splat(kInt4Beside[part]));
    numbers[part] = (VecF)_mm512_fmadd_ps((__m512)beside, (__m512)own.scales[group % 2][part], (__m512)own.addends[group % 2][part]);
  }
#ifdef SGL_BATCH_TWO_TO_BF16
  return (VecW)SGL_BATCH_TWO_TO_BF16(numbers[0], numbers[1]);
#else
  const __m512i low = _mm512_castsi256_si512((__m256i)to_bf16(numbers[0]));
  return (VecW)_mm512_inserti64x4(low, (__m256i)to_bf16(numbers[1]), 1);
#endif
}
#endif

// kInt4WordK of k, whose words begin there, to numbers of bf16.
inline void decode_int4_words(const uint32_t* words, const Int4Scales& own, uint16_t* to) {
#if SGL_BATCH_LANES == 16
  const VecU codes = *reinterpret_cast<const VecUU*>(words);
#pragma GCC unroll 4
  for (int group = 0; group < 4; ++group) store_words(to + group * kPanel, int4_numbers(codes, group, own));
#else
  for (int64_t i = 0; i < kInt4Words; i += kLanes) {
    const VecU codes = *reinterpret_cast<const VecUU*>(words + i);
    for (int group = 0; group < 4; ++group)
      for (int part = 0; part < 2; ++part) {
        const VecF whole = __builtin_convertvector((VecI)(codes >> (8 * group + 4 * part) & 15u), VecF);
        const int64_t number = part * kInt4Words + i, place = number / kLanes;
        const VecF exact = whole * own.scales[group % 2][place] + own.addends[group % 2][place];
        *reinterpret_cast<VecHU*>(to + group * kPanel + number) = to_bf16(exact);
      }
  }
#endif
}

// So many k, whole blocks of kInt4BlockK, whose scales and words begin there, to a panel of bf16. They begin with a group, or lie
// within one.
void decode_int4(const uint32_t* scales, const void* words, int64_t k, int64_t group, uint16_t* to) {
  const auto* from = static_cast<const uint32_t*>(words);
  for (int64_t first = 0; first < k; first += group, scales += kPanel) {
    const Int4Scales own(scales);
    const int64_t count = k - first < group ? k - first : group;
    for (int64_t i = 0; i < count; i += kInt4WordK, from += kInt4Words, to += kInt4WordK * kPanel) decode_int4_words(from, own, to);
  }
}

}  // namespace
}  // namespace sgl_batch
