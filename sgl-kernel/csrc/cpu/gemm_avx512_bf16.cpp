// The kernels for AVX512 with bf16 dot products: pairs of bf16 are multiplied and added up in f32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include <immintrin.h>

#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#include "gemm_vector.h"

namespace sgl_batch {
namespace {

template <int M>
struct TilePairs {
  static void run(const Tile& tile) {
    VecF acc[M][kVectors];
    begin_block<M>(acc, tile, 0);
    const uint32_t* b = static_cast<const uint32_t*>(tile.panel);
    Left<M> left(tile);
    Prefetch prefetch(tile, 0);
    for (int64_t step = 0; step < tile.k; step += 2, b += kPanel, left.advance(4), prefetch.advance()) {
      const __m512bh low = (__m512bh)_mm512_loadu_si512(b);
      const __m512bh high = (__m512bh)_mm512_loadu_si512(b + kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512bh row = (__m512bh)_mm512_set1_epi32(left.template word<int>(i));
        acc[i][0] = (VecF)_mm512_dpbf16_ps((__m512)acc[i][0], row, low);
        acc[i][1] = (VecF)_mm512_dpbf16_ps((__m512)acc[i][1], row, high);
      }
    }
    end_block<M>(acc, tile, 0);
  }
};

}  // namespace

constinit const Isa kAvx512Bf16 = isa_with("avx512_bf16", true, by_rows<TilePairs, kRows>);
}  // namespace sgl_batch
#endif
