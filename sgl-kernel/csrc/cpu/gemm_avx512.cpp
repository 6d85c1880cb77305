// The kernels for AVX512 without bf16 instructions: a bf16 weight is widened in a register.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#include "coded_tile_avx512.h"
#include "coded_widened.h"
#include "grouped_tile_avx512.h"
#include "gemm_vector.h"
#include "softmax_avx512.h"

namespace sgl_batch {
namespace {

// Weights of a softmax that meet widened values, whose sums are rounded to bf16.
struct F32Weights {
  using Number = float;
  static constexpr bool kRoundsToZero = false;
  static bool takes(const SoftmaxRows& r) { return r.dtype == DType::kF32 && r.coarse; }
  static __m512 two(__m512 first, __m512 second, Number* to, __m512 sum) {
    _mm512_storeu_ps(to, first);
    _mm512_storeu_ps(to + kLanes, second);
    return _mm512_add_ps(_mm512_add_ps(sum, first), second);
  }
};

template <int M>
struct TileCodedWidened : TileCoded<CodedWidened, M> {};
template <int M>
struct TileFp4Widened : TileGrouped<CodedWidened, PanelOfFp4, M> {};
template <int M>
struct TileInt4Widened : TileGrouped<CodedWidened, PanelOfInt4, M> {};
template <int M>
struct TileFp8Widened : TileGrouped<CodedWidened, PanelOfFp8, M> {};
template <int M>
struct TileInt8Widened : TileGrouped<CodedWidened, PanelOfInt8, M> {};

}  // namespace

constinit const Isa kAvx512 =
    isa_with("avx512", false,
             widening_kernel(by_rows<TileCodedWidened, kRows>, by_rows<TileFp4Widened, kRows>, by_rows<TileInt4Widened, kRows>,
                             by_rows<TileFp8Widened, kRows>, by_rows<TileInt8Widened, kRows>),
             coarse_softmax_step<F32Weights>);
}  // namespace sgl_batch
#endif
