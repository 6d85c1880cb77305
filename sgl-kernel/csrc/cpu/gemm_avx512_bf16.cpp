// The kernels for AVX512 with bf16 dot products: pairs of bf16 are multiplied and added up in f32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include <immintrin.h>

#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#define SGL_BATCH_TO_BF16(value) _mm512_cvtneps_pbh((__m512)(value))
#include "gemm_vector.h"

namespace sgl_batch {
namespace {

struct PairsBf16 {
  static constexpr int kBytes = 2;
  static __m512bh load(const char* from) { return (__m512bh)_mm512_loadu_si512(from); }
};
struct PairsI8 {
  static constexpr int kBytes = 1;
  static __m512bh load(const char* from) { return (__m512bh)Pairs(reinterpret_cast<const int8_t*>(from)).bf16(); }
};

template <int M, typename Weights>
struct TilePairs {
  static void run(const Tile& tile) {
    VecF acc[M][kVectors];
    begin_block<M>(acc, tile, 0);
    const char* b = static_cast<const char*>(tile.panel);
    Left<M> left(tile);
    Prefetch prefetch(tile, 0);
    for (int64_t step = 0; step < tile.k; step += 2, b += 2 * kPanel * Weights::kBytes, left.advance(4), prefetch.advance()) {
      const __m512bh low = Weights::load(b), high = Weights::load(b + 2 * kLanes * Weights::kBytes);
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

template <int M>
struct TileBf16Pairs : TilePairs<M, PairsBf16> {};
template <int M>
struct TileI8Pairs : TilePairs<M, PairsI8> {};

}  // namespace

constinit const Isa kAvx512Bf16 =
    isa_with("avx512_bf16", true, by_rows<TileBf16Pairs, kRows>, by_rows<TileI8Pairs, kRows>);
}  // namespace sgl_batch
#endif
