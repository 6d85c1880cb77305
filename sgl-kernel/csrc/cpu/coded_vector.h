// Owns decoding the blocks of coded panels on the compiler's vector types, for one instruction set chosen by the including
// file, see gemm_vector.h and coded.h.
#pragma once

#include "coded.h"
#include "rows_vector.h"

namespace sgl_batch {
namespace {

typedef uint16_t VecW __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecWU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef uint8_t VecB __attribute__((vector_size(kLanes * 4)));
constexpr int kWords = 2 * kLanes;

inline VecW load_words(const uint16_t* from) { return *reinterpret_cast<const VecWU*>(from); }
inline void store_words(uint16_t* to, VecW value) { *reinterpret_cast<VecWU*>(to) = value; }

#if SGL_BATCH_LANES == 16
// Half of the columns, the first half or the second, each in two lanes: those of a pair of k.
inline VecF twice(VecF columns, int half) {
  const __m512i pairs = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return (VecF)_mm512_permutexvar_ps(_mm512_add_epi32(pairs, _mm512_set1_epi32(kLanes / 2 * half)), (__m512)columns);
}

inline VecW two_to_bf16(VecF first, VecF second) {
#ifdef SGL_BATCH_TWO_TO_BF16
  return (VecW)SGL_BATCH_TWO_TO_BF16(first, second);
#else
  const __m512i low = _mm512_castsi256_si512((__m256i)to_bf16(first));
  return (VecW)_mm512_inserti64x4(low, (__m256i)to_bf16(second), 1);
#endif
}
#endif

inline VecW swap_bytes(VecW words) {
  VecB other;
  for (int i = 0; i < 2 * kWords; ++i) other[i] = i ^ 1;
  return (VecW)__builtin_shuffle((VecB)words, other);
}

// Gives for the lowest four bits of each word the exponent that they stand for, where it belongs in a number.
struct Exponents {
  explicit Exponents(uint32_t base) {
    for (int i = 0; i < kWords; ++i) table[i] = static_cast<uint16_t>((base + i % 16) << 7);
  }
#if SGL_BATCH_LANES == 16
  // A table of 32 words, so that it does not matter what the fifth bit is.
  VecW of(VecW codes) const { return (VecW)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table); }
#else
  VecW of(VecW codes) const { return ((codes & 15) << 7) + table[0]; }
#endif
  VecW table;
};

// Takes sign and fraction from `parts`.
inline VecW number(VecW parts, VecW exponents) {
#if SGL_BATCH_LANES == 16
  return (VecW)_mm512_ternarylogic_epi64(_mm512_set1_epi16(0x7f80), (__m512i)exponents, (__m512i)parts, 0xca);
#else
  return (parts & 0x807f) | exponents;
#endif
}

// Some columns of a block.
struct CodedWords {
  explicit CodedWords(const uint16_t* from) : parts{load_words(from), load_words(from + kPanel)}, codes(load_words(from + 2 * kPanel)) {}
  VecW numbers(int group, const Exponents& exponents) const {
    const VecW own = parts[group / 2];
    return number(group % 2 == 0 ? own : swap_bytes(own), exponents.of(codes >> static_cast<uint16_t>(4 * group)));
  }

  VecW parts[2];
  VecW codes;
};

void decode_blocks(const void* codes, int64_t blocks, uint32_t base, uint16_t* to) {
  const auto* from = static_cast<const uint16_t*>(codes);
  const Exponents exponents(base);
  for (int64_t block = 0; block < blocks; ++block, from += 3 * kPanel, to += 4 * kPanel) {
    for (int i = 0; i < kPanel; i += kWords) {
      const CodedWords words(from + i);
#pragma GCC unroll 4
      for (int group = 0; group < 4; ++group) store_words(to + group * kPanel + i, words.numbers(group, exponents));
    }
  }
}

}  // namespace
}  // namespace sgl_batch
