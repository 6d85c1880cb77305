// Owns the tile for AVX512 that takes a panel of four bits a number to bf16 as it multiplies, see fp4.h and int4.h. For the files
// of these kernels, each of which says how rows meet its numbers, as coded_tile_avx512.h has it.
#pragma once

#include "gemm_vector.h"

namespace sgl_batch {
namespace {

constexpr int64_t kFoursWordK = 4;
static_assert(kFoursWordK == kFp4WordK && kFoursWordK == kInt4WordK);

// A panel's numbers, block by block.
//   words: where its codes begin
//   block: how many k a block has
//   next(): goes to the next block; the first call goes to the first
//   of(codes, group): a vector of the block's numbers
struct PanelOfFp4 {
  explicit PanelOfFp4(const Tile& tile)
      : powers(static_cast<const uint8_t*>(tile.panel)), words(reinterpret_cast<const uint16_t*>(powers + fp4_power_bytes(tile.k))) {}
  void next() {
    lacks[0] = fp4_lacks(powers), lacks[1] = fp4_lacks(powers + kPanel / 2);
    powers += kPanel;
  }
  VecW of(VecW codes, int group) const { return numbers.of(codes >> static_cast<uint16_t>(4 * group), lacks[group % 2]); }

  static constexpr int64_t block = kFp4BlockK;
  const uint8_t* powers;
  const uint16_t* words;
  Fp4Numbers numbers;
  VecW lacks[2];
};

struct PanelOfInt4 {
  explicit PanelOfInt4(const Tile& tile)
      : block(tile.base),
        scales(static_cast<const uint32_t*>(tile.panel)),
        words(reinterpret_cast<const uint16_t*>(static_cast<const char*>(tile.panel) + int4_scale_bytes(tile.k, block))) {}
  void next() {
    own = Int4Scales(scales);
    scales += kPanel;
  }
  VecW of(VecW codes, int group) const { return numbers.of((VecU)codes, group, own); }

  const int64_t block;
  const uint32_t* scales;
  const uint16_t* words;
  Int4Numbers numbers;
  Int4Scales own;
};

// Where the next panel is not asked for, the core brings a panel's lines by itself, but none beyond the page that it reads:
// lines are asked for so far ahead.
constexpr int64_t kPageBytes = 4096;

template <typename Product, typename Panel, int M>
struct TileFours {
  static void run(const Tile& tile) {
    VecF acc[M][kVectors];
    begin_block(acc, tile, 0);
    Panel panel(tile);
    const uint16_t* from = panel.words;
    Left<M> left(tile);
    Prefetch prefetch(tile, 0);
    prefetch.step *= 2, prefetch.other_step *= 2;
    auto* kept = static_cast<typename Product::Kept*>(tile.kept);
    const char* beyond = reinterpret_cast<const char*>(from) + kPageBytes;
    const int64_t line = tile.ahead.step == 0 ? kLineBytes : 0;
    for (int64_t first = 0; first < tile.k; first += panel.block) {
      panel.next();
      for (int64_t k = 0; k < panel.block; k += kFoursWordK) {
        prefetch.advance();
        __builtin_prefetch(beyond, 0, 3);
        beyond += line;
        const VecW codes = load_words(from);
        VecW weights[4];
#pragma GCC unroll 4
        for (int group = 0; group < 4; ++group) weights[group] = panel.of(codes, group);
        Product::add(acc, left, weights, kept);
        from += kPanel;
        left.advance(kFoursWordK * Product::kRowBytes);
      }
    }
    end_block(acc, tile, 0);
  }
};

}  // namespace
}  // namespace sgl_batch
