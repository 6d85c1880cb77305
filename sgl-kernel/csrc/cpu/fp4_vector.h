// Owns taking numbers of mxfp4 to bf16 on the compiler's vector types, for one instruction set chosen by the including file, see
// gemm_vector.h and fp4.h.
#pragma once

#include "coded_vector.h"
#include "fp4.h"

namespace sgl_batch {
namespace {

// How much less than kFp4MostPower the powers of two of kLanes columns are, as what is taken from pairs of numbers of bf16.
inline VecW fp4_lacks(const uint8_t* powers) {
#if SGL_BATCH_LANES == 16
  const VecU wide = (VecU)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(powers)));
#else
  VecU wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = powers[i];
#endif
  const VecU lacks = (kFp4MostPower - wide) << 7;
  return (VecW)(lacks | lacks << 16);
}

// Gives for the lowest four bits of each word the number that they stand for, less what its power of two lacks.
struct Fp4Numbers {
#if SGL_BATCH_LANES == 16
  // A table of 32 words, so that it does not matter what the fifth bit is. Zeros have no sign: what is taken from them leaves 0.
  Fp4Numbers() {
    const __m128i largest = _mm_set1_epi16((kFp4MostPower - kFp4Bias) << 7);
    const __m128i half = _mm_setr_epi16(0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0);
    const __m128i positive = _mm_blend_epi16(_mm_add_epi16(half, largest), _mm_setzero_si128(), 1);
    const __m128i negative = _mm_blend_epi16(_mm_or_si128(positive, _mm_set1_epi16(-0x8000)), _mm_setzero_si128(), 1);
    table = (VecW)_mm512_broadcast_i64x4(_mm256_set_m128i(negative, positive));
  }
  VecW of(VecW codes, VecW lacks) const {
    return (VecW)_mm512_subs_epu16(_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table), (__m512i)lacks);
  }
  VecW table;
#else
  // Those from 1 on lie half a step of the exponent apart.
  VecW of(VecW codes, VecW lacks) const {
    constexpr int kHalf = 0x3f00 + ((kFp4MostPower - kFp4Bias) << 7);
    const VecW own = codes & 7;
    const VecW numbers = (own << 6) + kHalf - ((VecW)(own == 1) & 0x40) - lacks;
    return (numbers | (codes & 8) << 12) & (VecW)(own != 0);
  }
#endif
};

// Blocks of 32 k, whose powers and words begin there, to a panel of bf16.
void decode_fp4(const uint8_t* powers, const void* words, int64_t blocks, uint16_t* to) {
  const Fp4Numbers numbers;
  const auto* from = static_cast<const uint16_t*>(words);
  constexpr int kQuads = kFp4BlockK / kFp4WordK;
  for (int64_t block = 0; block < blocks; ++block, powers += kPanel, from += kQuads * kPanel, to += kQuads * 4 * kPanel)
    for (int i = 0; i < kPanel; i += kWords) {
      const VecW lacks[2] = {fp4_lacks(powers + i / 2), fp4_lacks(powers + kPanel / 2 + i / 2)};
      for (int quad = 0; quad < kQuads; ++quad) {
        const VecW codes = load_words(from + quad * kPanel + i);
#pragma GCC unroll 4
        for (int group = 0; group < 4; ++group)
          store_words(to + (4 * quad + group) * kPanel + i, numbers.of(codes >> static_cast<uint16_t>(4 * group), lacks[group % 2]));
      }
    }
}

}  // namespace
}  // namespace sgl_batch
