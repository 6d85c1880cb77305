// Owns taking floats of eight bits to bf16 on the compiler's vector types, for one instruction set chosen by the including file, see
// gemm_vector.h and fp8.h.
#pragma once

#include "coded_vector.h"
#include "fp8.h"

namespace sgl_batch {
namespace {

constexpr int64_t kFp8BytesOfTwo = 2 * kPanel;  // of codes of two groups

// Codes of one group of the two that bytes have, each the upper byte of a word.
inline VecW fp8_upper(const uint8_t* from, int group) {
  typedef uint8_t VecBU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
  const VecB bytes = *reinterpret_cast<const VecBU*>(from);
  VecB order;
  for (int word = 0; word < kWords; ++word) {
    order[2 * word] = 0;
    order[2 * word + 1] = static_cast<uint8_t>(2 * kWords + word / 8 * 16 + 8 * group + word % 8);
  }
  return (VecW)__builtin_shuffle(VecB{}, bytes, order);
}

// Rounded to bf16, to nearest, ties to even, in the upper half of each lane; what is below does not count. No number is a NaN.
inline VecU fp8_rounded(VecF exact) {
  const VecU bits = (VecU)exact;
  return bits + 0x7fff + (bits >> 16 & 1);
}

// Codes in upper bytes as numbers of bf16 that are too small, see kFp8ScaleUp: a sign, and the other bits where such a number has
// the lower ones of its exponent and the upper ones of its fraction.
inline VecU fp8_placed(VecW upper) {
  typedef int16_t Signed __attribute__((vector_size(kLanes * 4)));
  return (VecU)((VecW)((Signed)upper >> 4) & 0x87f0);
}
// Those of lower and of upper words.
inline VecF fp8_even(VecU placed) { return (VecF)(placed << 16); }
inline VecF fp8_odd(VecU placed) { return (VecF)(placed & 0xffff0000u); }

// Codes of kLanes columns to numbers. Words have an even k below and an odd one above.
inline VecW fp8_numbers(VecW upper, VecF scales) {
  const VecU placed = fp8_placed(upper);
  return (VecW)(fp8_rounded(fp8_even(placed) * scales) >> 16 | (fp8_rounded(fp8_odd(placed) * scales) & 0xffff0000u));
}

// The scales of kPanel columns.
struct Fp8Scales {
  static constexpr int kParts = kPanel / kLanes;

  explicit Fp8Scales(const float* given) {
    for (int i = 0; i < kParts; ++i) of_columns[i] = load(given + i * kLanes);
  }
#if SGL_BATCH_LANES == 16
  // The numbers of two pairs of k, whose codes begin there.
  [[gnu::always_inline]] void all(const void* from, VecW (&weights)[4]) const {
    const auto* codes = static_cast<const uint8_t*>(from);
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group)
      weights[group] = fp8_numbers(fp8_upper(codes + group / 2 * kFp8BytesOfTwo, group % 2), of_columns[group % 2]);
  }
#endif

  VecF of_columns[kParts];
};

// So many k, whole blocks of kFp8BlockK, whose scales and codes begin there, to a panel of bf16. They begin with a group, or lie
// within one.
[[maybe_unused]] void decode_fp8(const float* scales, const void* codes, int64_t k, int64_t group, uint16_t* to) {
  const auto* from = static_cast<const uint8_t*>(codes);
  for (int64_t first = 0; first < k; first += group, scales += kPanel) {
    const Fp8Scales own(scales);
    const int64_t pairs = (k - first < group ? k - first : group) / 2;
    for (int64_t pair = 0; pair < pairs; ++pair, from += kFp8BytesOfTwo)
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < kPanel; i += kWords, to += kWords)
          store_words(to, fp8_numbers(fp8_upper(from + 2 * i, half), own.of_columns[(half * kPanel + i) / kWords]));
  }
}

}  // namespace
}  // namespace sgl_batch
