// The int8 kernel for AVX512 with VNNI: four products of bytes are added up in each int32 by one instruction.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include <immintrin.h>

#include "gemm_int8_rows.h"

namespace sgl_batch {
namespace {

constexpr int kRows = 12;

template <int M>
struct TileQuads {
  static void run(const Int8Tile& tile) {
    __m512i sums[M][2];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = _mm512_set1_epi32(tile.starts[i]);
    const uint8_t* b = tile.panel;
    QuadRows<M> rows(tile);
    QuadPrefetch prefetch(tile.ahead);
    for (int64_t step = 0; step < tile.steps; ++step, b += kStepBytes, rows.advance(), prefetch.advance()) {
      const __m512i low = _mm512_loadu_si512(b), high = _mm512_loadu_si512(b + kStepBytes / 2);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512i row = _mm512_set1_epi32(rows.quad(i));
        sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], low, row);
        sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], high, row);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      _mm512_storeu_si512(tile.c + i * kPanel, sums[i][0]);
      _mm512_storeu_si512(tile.c + i * kPanel + 16, sums[i][1]);
    }
  }
};

}  // namespace

constinit const Int8Kernel kAvx512VnniInt8{
    .name = "avx512_vnni", .run = by_rows<TileQuads, kRows>, .max_rows = kRows, .release = nullptr};
}  // namespace sgl_batch
#endif
