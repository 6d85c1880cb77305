// Owns taking integers of four bits to bf16 on the compiler's vector types, for one instruction set chosen by the including file,
// see gemm_vector.h and int4.h.
#pragma once

#include "coded_vector.h"
#include "int4.h"

namespace sgl_batch {
namespace {

// A panel's words of 32 bits for kInt4WordK of k.
constexpr int64_t kInt4Words = kPanel / 2;
// Codes of the second vector of a group's numbers stand beside this in f32. Times a scale of 16 bits the sum is exact, and what is left
// when this and the zero point are taken away is so, too.
constexpr float kInt4Beside[2] = {0.0f, 128.0f};
constexpr uint32_t kInt4Placed = 0xf0000;  // where they lie in it

// What makes numbers of codes for kPanel columns, in the order of numbers: each column's twice.
struct Int4Scales {
  static constexpr int kParts = kPanel / kLanes;  // vectors of kPanel numbers

  Int4Scales() = default;
  explicit Int4Scales(const uint32_t* words) {
#if SGL_BATCH_LANES == 16
    for (int half = 0; half < 2; ++half) {
      const VecU own = *reinterpret_cast<const VecUU*>(words + half * kLanes);
      const VecF scale = (VecF)(own & kInt4Scale), zero = __builtin_convertvector((VecI)(own & kInt4Zero), VecF);
      for (int part = 0; part < kParts; ++part) {
        scales[half][part] = twice(scale, part);
        addends[half][part] = twice(-scale * (zero + kInt4Beside[part]), part);
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
// Gives a group's numbers of kInt4Words words. Indexing and putting beside are done by different parts of a core.
struct Int4Numbers {
  Int4Numbers() : table(_mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)) {}
  VecW of(VecU codes, int group, const Int4Scales& own) const {
    const VecU placed = codes >> (4 * group);
    const __m512 whole[2] = {_mm512_permutexvar_ps((__m512i)placed, table),  // of the lowest four bits alone
                             (__m512)((placed & kInt4Placed) | (VecU)splat(kInt4Beside[1]))};
    VecF numbers[2];
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part)
      numbers[part] = (VecF)_mm512_fmadd_ps(whole[part], (__m512)own.scales[group % 2][part], (__m512)own.addends[group % 2][part]);
    return two_to_bf16(numbers[0], numbers[1]);
  }
  __m512 table;
};
#endif

// kInt4WordK of k, whose words begin there, to numbers of bf16.
inline void decode_int4_words(const uint32_t* words, const Int4Scales& own, uint16_t* to) {
#if SGL_BATCH_LANES == 16
  const Int4Numbers numbers;
  const VecU codes = *reinterpret_cast<const VecUU*>(words);
#pragma GCC unroll 4
  for (int group = 0; group < 4; ++group) store_words(to + group * kPanel, numbers.of(codes, group, own));
#else
  for (int64_t i = 0; i < kInt4Words; i += kLanes) {
    const VecU codes = *reinterpret_cast<const VecUU*>(words + i);
    for (int group = 0; group < 4; ++group)
      for (int part = 0; part < 2; ++part) {
        const VecF whole = __builtin_convertvector((VecI)(codes >> (16 * part + 4 * group) & 15u), VecF);
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
