// Owns how rows of pairs of bf16 meet four k of a panel that is decoded as it is multiplied, on AVX512 with bf16 instructions: see
// coded_tile_avx512.h and grouped_tile_avx512.h.
#pragma once

#include "gemm_vector.h"

namespace sgl_batch {
namespace {

// How pairs of rows meet a coded block.
struct CodedPairs {
  using Kept = uint16_t;
  static constexpr int64_t kRowBytes = 2;

  template <int M>
  [[gnu::always_inline]] static void add(VecF (&acc)[M][kVectors], const Left<M>& left, const VecW (&weights)[4], Kept*& kept) {
    if (kept != nullptr) {
#pragma GCC unroll 4
      for (int group = 0; group < 4; ++group) store_words(kept + group * kPanel, weights[group]);
      kept += kCodedBlockNumbers;
    }
#pragma GCC unroll 2
    for (int step = 0; step < 2; ++step)
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512bh row = (__m512bh)_mm512_set1_epi32(left.template word<int>(i, step));
        acc[i][0] = (VecF)_mm512_dpbf16_ps((__m512)acc[i][0], row, (__m512bh)weights[2 * step]);
        acc[i][1] = (VecF)_mm512_dpbf16_ps((__m512)acc[i][1], row, (__m512bh)weights[2 * step + 1]);
      }
  }
};

}  // namespace
}  // namespace sgl_batch
