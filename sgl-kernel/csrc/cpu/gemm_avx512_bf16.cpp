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
  static void run(const void* a, const void* panel, int64_t k, float* c) {
    const uint32_t* x = static_cast<const uint32_t*>(a);
    const uint32_t* b = static_cast<const uint32_t*>(panel);
    __m512 acc[M][kVectors];
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < kVectors; ++v) acc[i][v] = _mm512_setzero_ps();
    for (int64_t step = 0; step < k; step += 2, b += kPanel, x += M) {
      const __m512bh left = (__m512bh)_mm512_loadu_si512(b);
      const __m512bh right = (__m512bh)_mm512_loadu_si512(b + kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512bh row = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[i]));
        acc[i][0] = _mm512_dpbf16_ps(acc[i][0], row, left);
        acc[i][1] = _mm512_dpbf16_ps(acc[i][1], row, right);
      }
    }
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + i * kPanel + v * kLanes, acc[i][v]);
  }
};

}  // namespace

const Isa kAvx512Bf16{"avx512_bf16", kRows, true, by_rows<TilePairs, kRows>, by_rows<TileF32, kRows>, silu_mul, softmax_step};
}  // namespace sgl_batch
#endif
