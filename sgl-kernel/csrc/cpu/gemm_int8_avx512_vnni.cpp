// The int8 kernel for AVX512 with VNNI: four products of bytes are added up in each int32 by one instruction.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include <immintrin.h>

#include "gemm_int8_rows.h"

namespace sgl_batch {
namespace {

constexpr int kRows = 12;

// With this type from the first sum to the last use of it the compiler keeps each in one register.
typedef uint32_t Sums __attribute__((vector_size(64)));

inline const Int8Tile& sums_of(const Int8Tile& tile) { return tile; }
inline const Int8Tile& sums_of(const ScaledInt8Tile& tile) { return tile.sums; }

inline void put(const Int8Tile& tile, int row, Sums low, Sums high) {
  _mm512_storeu_si512(tile.c + row * kPanel, (__m512i)low);
  _mm512_storeu_si512(tile.c + row * kPanel + 16, (__m512i)high);
}

inline __m512 numbers(Sums sums) { return (__m512)__builtin_convertvector((__v16si)sums, __v16sf); }

inline void put(const ScaledInt8Tile& tile, int row, Sums low, Sums high) {
  const Scaling& by = tile.by;
  const auto shift = (Sums)_mm512_set1_epi32(by.row_shifts[row]);
  const __m512 scale = _mm512_set1_ps(by.row_scales[row]);
  float* to = tile.to + row * tile.to_stride;
  _mm512_storeu_ps(to, numbers(low + shift) * scale * _mm512_loadu_ps(by.column_scales));
  _mm512_storeu_ps(to + 16, numbers(high + shift) * scale * _mm512_loadu_ps(by.column_scales + 16));
}

template <int M, typename Tile, int kCache>
struct Quads {
  static void run(const Tile& given) {
    const Int8Tile& tile = sums_of(given);
    Sums sums[M][2];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = Sums{};
    const uint8_t* b = tile.panel;
    QuadRows<M> rows(tile);
    QuadPrefetch<kCache> prefetch(tile.ahead);
    for (int64_t step = 0; step < tile.steps; ++step, b += kStepBytes, rows.advance(), prefetch.advance()) {
      const __m512i low = _mm512_loadu_si512(b), high = _mm512_loadu_si512(b + kStepBytes / 2);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512i row = _mm512_set1_epi32(rows.quad(i));
        sums[i][0] = (Sums)_mm512_dpbusd_epi32((__m512i)sums[i][0], low, row);
        sums[i][1] = (Sums)_mm512_dpbusd_epi32((__m512i)sums[i][1], high, row);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) put(given, i, sums[i][0], sums[i][1]);
  }
};

template <int M, typename Tile>
struct QuadsOf {
  static void run(const Tile& tile) { sums_of(tile).ahead_is_near ? Quads<M, Tile, 3>::run(tile) : Quads<M, Tile, 2>::run(tile); }
};
template <int M>
struct TileQuads : QuadsOf<M, Int8Tile> {};
template <int M>
struct ScaledQuads : QuadsOf<M, ScaledInt8Tile> {};

}  // namespace

constinit const Int8Kernel kAvx512VnniInt8{.name = "avx512_vnni",
                                           .run = by_rows<TileQuads, kRows>,
                                           .run_scaled = by_rows<ScaledQuads, kRows, ScaledInt8Tile>,
                                           .divide = divide_avx512,
                                           .cut = {.max_rows = kRows}};
}  // namespace sgl_batch
#endif
