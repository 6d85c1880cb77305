// The kernels for AVX512 without bf16 instructions: a bf16 weight is widened in a register.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#include "coded_tile_avx512.h"
#include "fours_tile_avx512.h"
#include "gemm_vector.h"
#include "softmax_avx512.h"

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
struct TileFp4Widened : TileFours<CodedWidened, PanelOfFp4, M> {};
template <int M>
struct TileInt4Widened : TileFours<CodedWidened, PanelOfInt4, M> {};

}  // namespace

constinit const Isa kAvx512 =
    isa_with("avx512", false,
             widening_kernel(by_rows<TileCodedWidened, kRows>, by_rows<TileFp4Widened, kRows>, by_rows<TileInt4Widened, kRows>),
             coarse_softmax_step<F32Weights>);
}  // namespace sgl_batch
#endif
