// Owns the tile for AVX512 that takes a panel of fp4 to bf16 as it multiplies, see fp4.h. For the files of these kernels, each
// of which says how rows meet its numbers, as coded_tile_avx512.h has it.
#pragma once

#include "gemm_vector.h"

namespace sgl_batch {
namespace {

template <typename Product, int M>
struct TileFp4 {
  static void run(const Tile& tile) {
    VecF acc[M][kVectors];
    begin_block(acc, tile, 0);
    const auto* powers = static_cast<const uint8_t*>(tile.panel);
    const auto* from = reinterpret_cast<const uint16_t*>(powers + fp4_power_bytes(tile.k));
    const Fp4Numbers numbers;
    Left<M> left(tile);
    Prefetch prefetch(tile, 0);
    prefetch.step *= 2, prefetch.other_step *= 2;
    auto* kept = static_cast<typename Product::Kept*>(tile.kept);
    for (int64_t block = tile.k / kFp4BlockK; block > 0; --block, powers += kPanel) {
      const VecW lacks[kVectors] = {fp4_lacks(powers), fp4_lacks(powers + kPanel / 2)};
      for (int quad = 0; quad < kFp4BlockK / kFp4WordK; ++quad) {
        prefetch.advance();
        const VecW codes = load_words(from);
        VecW weights[4];
#pragma GCC unroll 4
        for (int group = 0; group < 4; ++group)
          weights[group] = numbers.of(codes >> static_cast<uint16_t>(4 * group), lacks[group % 2]);
        Product::add(acc, left, weights, kept);
        from += kPanel;
        left.advance(kFp4WordK * Product::kRowBytes);
      }
    }
    end_block(acc, tile, 0);
  }
};

}  // namespace
}  // namespace sgl_batch
