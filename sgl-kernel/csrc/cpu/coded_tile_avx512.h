// Owns the tile for AVX512 that decodes its panel block by block as it multiplies, see coded.h. For the files of these
// kernels, each of which says how rows meet a block.
#pragma once

#include "gemm_vector.h"

namespace sgl_batch {
namespace {

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

// Product: how rows meet a block's four vectors of bf16, and what of it is kept.
//   kRowBytes: of a number of rows
//   add(acc, left, weights, kept): adds a block's products; where `kept` is not null, the block goes there, and it moves on
template <typename Product, int M>
struct TileCoded {
  static void run(const Tile& tile) {
    VecF acc[M][kVectors];
    begin_block(acc, tile, 0);
    const auto* from = static_cast<const uint16_t*>(tile.panel);
    const Exponents exponents(tile.base);
    Left<M> left(tile);
    UncodedNumbers others(tile);
    auto* kept = static_cast<typename Product::Kept*>(tile.kept);
    const auto* ahead = static_cast<const char*>(tile.ahead.from);
    const auto* rows = static_cast<const char*>(tile.ahead.rows);
    // The next panel's list begins behind its codes; it is seldom longer than this.
    for (int line = 0; line < 2; ++line) __builtin_prefetch(ahead + coded_bytes(tile.k) + line * kLineBytes, 0, 2);
    const auto blocks = static_cast<uint32_t>(tile.k / kCodedBlockK);
    for (uint32_t block = 0; block < blocks; ++block, from += 3 * kPanel, left.advance(kCodedBlockK * Product::kRowBytes)) {
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
      Product::add(acc, left, weights, kept);
    }
    end_block(acc, tile, 0);
  }
};

}  // namespace
}  // namespace sgl_batch
