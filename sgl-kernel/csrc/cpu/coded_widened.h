// Owns how rows of f32 meet four k of a panel that is decoded as it is multiplied, on AVX512: see coded_tile_avx512.h and
// grouped_tile_avx512.h.
#pragma once

#include "gemm_vector.h"

namespace sgl_batch {
namespace {

// How rows of f32 meet a coded block. Its numbers go by way of memory, in the first cache: registers have no room for them all.
struct CodedWidened {
  using Kept = float;
  static constexpr int64_t kRowBytes = 4;

  template <int M>
  [[gnu::always_inline]] static void add(VecF (&acc)[M][kVectors], const Left<M>& left, const VecW (&weights)[4], Kept*& kept) {
    alignas(64) float own[kCodedBlockNumbers];
    float* const numbers = kept == nullptr ? own : kept;
    if (kept != nullptr) kept += kCodedBlockNumbers;
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) {
      float* const to = numbers + group / 2 * 2 * kPanel + group % 2 * kLanes;
      const VecU pairs = (VecU)weights[group];
      store(to, (VecF)(pairs << 16));
      store(to + kPanel, (VecF)(pairs & 0xffff0000u));
    }
    asm volatile("" ::: "memory");  // else the compiler keeps them in registers
#pragma GCC unroll 4
    for (int k = 0; k < kCodedBlockK; ++k) {
      const VecF first = load(numbers + k * kPanel), second = load(numbers + k * kPanel + kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const float row = left.template word<float>(i, k);
        acc[i][0] += first * row;
        acc[i][1] += second * row;
      }
    }
  }
};

}  // namespace
}  // namespace sgl_batch
