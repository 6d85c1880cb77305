// The kernels for AVX512 with bf16 dot products: pairs of bf16 are multiplied and added up in f32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include <immintrin.h>

#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#define SGL_BATCH_TO_BF16(value) _mm512_cvtneps_pbh((__m512)(value))
#define SGL_BATCH_TWO_TO_BF16(first, second) _mm512_cvtne2ps_pbh((__m512)(second), (__m512)(first))
#include "gemm_vector.h"
#include "softmax_avx512_bf16.h"

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

// The numbers of a coded panel that have no code, in the order of its blocks.
struct UncodedNumbers {
  explicit UncodedNumbers(const Tile& tile) : one(uncoded(tile.panel, tile.k)), block(one->place / kCodedBlockNumbers) {}

  // The numbers of the block at `from`, with those that have no code. Decoded anew: to keep them for this would take registers.
  [[gnu::noinline]] void put(const uint16_t* from, uint32_t base, uint16_t* all) {
    decode_blocks(from, 1, base, all);
    const uint32_t here = block;
    do {
      all[one->place % kCodedBlockNumbers] = one->number;
      ++one;
      block = one->place / kCodedBlockNumbers;
    } while (block == here);
  }

  const Uncoded* one;
  uint32_t block;
};

// A tile that decodes its panel block by block as it multiplies.
template <int M>
struct TileCodedPairs {
  static void run(const Tile& tile) {
    VecF acc[M][kVectors];
    begin_block(acc, tile, 0);
    const auto* from = static_cast<const uint16_t*>(tile.panel);
    const Exponents exponents(tile.base);
    Left<M> left(tile);
    UncodedNumbers others(tile);
    auto* decoded = static_cast<uint16_t*>(tile.decoded);
    const auto* ahead = static_cast<const char*>(tile.ahead.from);
    const auto* rows = static_cast<const char*>(tile.ahead.rows);
    // The next panel's list begins behind its codes; it is seldom longer than this.
    for (int line = 0; line < 2; ++line) __builtin_prefetch(ahead + coded_bytes(tile.k) + line * kLineBytes, 0, 2);
    const auto blocks = static_cast<uint32_t>(tile.k / kCodedBlockK);
    for (uint32_t block = 0; block < blocks; ++block, from += 3 * kPanel, left.advance(8)) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + kLineBytes, 0, 2);
      __builtin_prefetch(rows == nullptr ? ahead + 2 * kLineBytes : rows, 0, 2);
      ahead += 2 * tile.ahead.step;
      if (rows != nullptr) rows += 2 * tile.ahead.rows_step;
      const CodedWords words(from);
      VecW weights[4];
#pragma GCC unroll 4
      for (int group = 0; group < 4; ++group) weights[group] = words.numbers(group, exponents);
      if (__builtin_expect(block == others.block, 0)) {
        alignas(64) uint16_t all[kCodedBlockNumbers];
        others.put(from, tile.base, all);
        for (int group = 0; group < 4; ++group) weights[group] = load_words(all + group * kPanel);
      }
      if (decoded != nullptr) {
#pragma GCC unroll 4
        for (int group = 0; group < 4; ++group) store_words(decoded + group * kPanel, weights[group]);
        decoded += kCodedBlockNumbers;
      }
#pragma GCC unroll 2
      for (int step = 0; step < 2; ++step)
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
          const __m512bh row = (__m512bh)_mm512_set1_epi32(left.template word<int>(i, step));
          acc[i][0] = (VecF)_mm512_dpbf16_ps((__m512)acc[i][0], row, (__m512bh)weights[2 * step]);
          acc[i][1] = (VecF)_mm512_dpbf16_ps((__m512)acc[i][1], row, (__m512bh)weights[2 * step + 1]);
        }
    }
    end_block(acc, tile, 0);
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
                       by_rows<TileBf16Pairs, kRows>, by_rows<TileCodedPairs, kRows>),
             softmax_step_bf16);
}  // namespace sgl_batch
#endif
