// Owns what the int8 kernels on vectors share: the rows of a tile's left side, what they bring closer, and one compiled
// kernel for each number of rows. For one instruction set chosen by the including file, see gemm_vector.h.
#pragma once

#include "gemm_int8.h"

namespace sgl_batch {
namespace {

// Three rows share a pointer, so that twelve need four registers and one stride.
template <int M>
struct QuadRows {
  static constexpr int kPointers = (M + 2) / 3;

  explicit QuadRows(const Int8Tile& tile) : stride(tile.a_stride) {
    for (int i = 0; i < kPointers; ++i) at[i] = tile.a + 3 * i * stride;
  }
  // The four numbers of a row in this step.
  int quad(int row) const {
    typedef int Word __attribute__((aligned(1), may_alias));
    return *reinterpret_cast<const Word*>(at[row / 3] + (row % 3) * stride);
  }
  void advance() {
#pragma GCC unroll 16
    for (int i = 0; i < kPointers; ++i) at[i] += kQuad;
  }

  const int8_t* at[kPointers];
  int64_t stride;
};

// To the first cache (3) or to the second (2).
template <int kCache = 3>
struct QuadPrefetch {
  explicit QuadPrefetch(const Ahead& ahead) : at(static_cast<const char*>(ahead.from)), step(ahead.step) {}
  void advance() {
    __builtin_prefetch(at, 0, kCache);
    __builtin_prefetch(at + kStepBytes / 2, 0, kCache);
    at += step;
  }

  const char* at;
  int64_t step;
};

inline int rows_of(const Int8Tile& tile) { return tile.m; }
[[maybe_unused]] inline int rows_of(const ScaledInt8Tile& tile) { return tile.sums.m; }

template <template <int> class Kernel, int M, typename Tile = Int8Tile>
void by_rows(const Tile& tile) {
  if constexpr (M > 1) {
    if (rows_of(tile) < M) return by_rows<Kernel, M - 1, Tile>(tile);
  }
  Kernel<M>::run(tile);
}

}  // namespace
}  // namespace sgl_batch
