// The kernels for AVX512 with bf16 dot products: pairs of bf16 are multiplied and added up in f32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include <immintrin.h>

#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#define SGL_BATCH_TO_BF16(value) _mm512_cvtneps_pbh((__m512)(value))
#define SGL_BATCH_TWO_TO_BF16(first, second) _mm512_cvtne2ps_pbh((__m512)(second), (__m512)(first))
#include "coded_pairs.h"
#include "coded_tile_avx512.h"
#include "grouped_tile_avx512.h"
#include "gemm_vector.h"
#include "softmax_avx512.h"

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

// A tile of the first `vectors` vectors of columns.
template <int M, typename Weights, int vectors = kVectors>
struct TilePairs {
  static void run(const Tile& tile) {
    VecF acc[M][vectors];
    begin_block(acc, tile, 0);
    Left<M> left(tile);
    Prefetch prefetch(tile, 0);
    multiply(acc, tile.panel, tile.k, left, prefetch);
    end_block(acc, tile, 0);
  }
  static void run(const Tile& tile, const void* second, int64_t second_k) {
    VecF acc[M][vectors];
    begin_block(acc, tile, 0);
    Left<M> left(tile);
    Prefetch prefetch(tile, 0);
    multiply(acc, tile.panel, tile.k, left, prefetch);
    multiply(acc, second, second_k, left, prefetch);
    end_block(acc, tile, 0);
  }

 private:
  [[gnu::always_inline]] static void multiply(VecF (&acc)[M][vectors], const void* panel, int64_t k, Left<M>& left,
                                              Prefetch& prefetch) {
    const char* b = static_cast<const char*>(panel);
    for (int64_t step = 0; step < k; step += 2, b += 2 * kPanel * Weights::kBytes, left.advance(4), prefetch.advance()) {
      __m512bh weights[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) weights[v] = Weights::load(b + 2 * v * kLanes * Weights::kBytes);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512bh row = (__m512bh)_mm512_set1_epi32(left.template word<int>(i));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) acc[i][v] = (VecF)_mm512_dpbf16_ps((__m512)acc[i][v], row, weights[v]);
      }
    }
  }
};

template <int M>
struct TileCodedPairs : TileCoded<CodedPairs, M> {};
template <int M>
struct TileFp4Pairs : TileGrouped<CodedPairs, PanelOfFp4, M> {};
template <int M>
struct TileInt4Pairs : TileGrouped<CodedPairs, PanelOfInt4, M> {};
template <int M>
struct TileInt8Pairs : TileGrouped<CodedPairs, PanelOfInt8, M> {};
// Weights of a softmax as pairs.
struct Bf16Weights {
  using Number = uint16_t;
  static constexpr bool kRoundsToZero = true;
  static bool takes(const SoftmaxRows& r) { return r.dtype == DType::kBf16; }
  static __m512 two(__m512 first, __m512 second, Number* to, __m512 sum) {
    const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(to, (__m512i)both);
    return _mm512_dpbf16_ps(sum, both, (__m512bh)_mm512_set1_epi16(0x3f80));
  }
};

template <int M>
struct TileBf16Pairs : TilePairs<M, PairsBf16> {};
template <int M>
struct TileHalfPairs : TilePairs<M, PairsBf16, kVectors / 2> {};
template <int M>
struct TileI8Pairs : TilePairs<M, PairsI8> {};

}  // namespace

constinit const Isa kAvx512Bf16 =
    isa_with("avx512_bf16", true,
             kernel_of(by_rows<TileBf16Pairs, kRows>, by_rows<TileI8Pairs, kRows>, by_rows<TileHalfPairs, kRows>,
                       by_rows<TileBf16Pairs, kRows>, by_rows<TileCodedPairs, kRows>, by_rows<TileBf16Pairs, kRows>, nullptr,
                       by_rows<TileFp4Pairs, kRows>, by_rows<TileInt4Pairs, kRows>, nullptr, by_rows<TileInt8Pairs, kRows>),
             coarse_softmax_step<Bf16Weights>);
}  // namespace sgl_batch
#endif
