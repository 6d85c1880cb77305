// The kernels of latent attention for AVX512 with bf16 dot products: bf16 stays in pairs.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include <immintrin.h>

#define SGL_BATCH_LANES 16
#define SGL_BATCH_MLA_TILE 16
#include "attention_mla_vector.h"

namespace sgl_batch {
namespace {

struct PairWord {
  using Word = uint32_t;
  using Vector = __m512bh;
  static Vector lanes(const Word* b) { return (__m512bh)_mm512_loadu_si512(b); }
  static Vector splat_word(Word a) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(a)); }
  static void add(VecF& acc, Vector a, Vector b) { acc = (VecF)_mm512_dpbf16_ps((__m512)acc, a, b); }
};

template <int V>
void softmax_pairs(float* scores, int64_t count, const int32_t* seen, float scaling, float* state, float* kept,
                   void* weights) {
  constexpr int kWide = V * kLanes;
  softmax_chunk<V>(scores, count, seen, scaling, state, kept);
  auto* pairs = static_cast<uint32_t*>(weights);
  for (int64_t t = 0; t < count; t += 2)
    for (int lane = 0; lane < kWide; lane += kLanes) {
      const VecF odd = t + 1 < count ? load(scores + (t + 1) * kWide + lane) : VecF{};
      const VecU low = __builtin_convertvector(to_bf16(load(scores + t * kWide + lane)), VecU);
      *reinterpret_cast<VecUU*>(pairs + t / 2 * kWide + lane) = low | __builtin_convertvector(to_bf16(odd), VecU) << 16;
    }
}

void interleave(const uint16_t* a, const uint16_t* b, int64_t count, uint32_t* out) {
  if (b == nullptr)
    for (int64_t i = 0; i < count; ++i) out[i] = a[i];
  else
    for (int64_t i = 0; i < count; ++i) out[i] = a[i] | static_cast<uint32_t>(b[i]) << 16;
}

template <int V>
constexpr MlaWidth kWidth{Width<V>::kWide,        Width<V>::kTile,        keys_tile<F32Word, V>,  values_tile<F32Word, V>,
                          softmax_f32<V>, keys_tile<PairWord, V>, values_tile<PairWord, V>, softmax_pairs<V>};

}  // namespace

const MlaKernels kMlaAvx512Bf16{kWidth<1>, kWidth<2>, pack_lanes, unpack_lanes, interleave};
}  // namespace sgl_batch
#endif
