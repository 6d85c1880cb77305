// Owns the tile for AVX512 that takes a panel of numbers that share scales to bf16 as it multiplies, see fp4.h, int4.h,
// fp8.h and int8_groups.h.
// For the files of these kernels, each of which says how rows meet its numbers, as coded_tile_avx512.h has it.
#pragma once

#include "gemm_vector.h"

namespace sgl_batch {
namespace {

constexpr int64_t kGroupedWordK = 4;
static_assert(kGroupedWordK == kFp4WordK && kGroupedWordK == kInt4WordK);

// A panel's numbers, block by block.
//   codes: where its codes begin
//   block: how many k a block has
//   lines: how many cache lines of codes kGroupedWordK has
//   next(each): goes to the next block, at first to the first, and calls each(numbers) with what knows its numbers:
//     numbers.all(from, weights) gives those of kGroupedWordK whose codes begin there
struct PanelOfFp4 {
  explicit PanelOfFp4(const Tile& tile)
      : powers(static_cast<const uint8_t*>(tile.panel)), codes(reinterpret_cast<const char*>(powers + fp4_power_bytes(tile.k))) {}
  template <typename Each>
  [[gnu::always_inline]] void next(const Each& each) {
    lacks[0] = fp4_lacks(powers), lacks[1] = fp4_lacks(powers + kPanel / 2);
    powers += kPanel;
    each(*this);
  }
  [[gnu::always_inline]] void all(const char* from, VecW (&weights)[4]) const {
    const VecW words = load_words(reinterpret_cast<const uint16_t*>(from));
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group)
      weights[group] = numbers.of(words >> static_cast<uint16_t>(4 * group), lacks[group % 2]);
  }

  static constexpr int64_t block = kFp4BlockK, lines = 1;
  const uint8_t* powers;
  const char* codes;
  Fp4Numbers numbers;
  VecW lacks[2];
};

// With a word for each column and group before the codes. Block: calls each(numbers), given where a block's words begin.
template <typename Word, int64_t kLines, typename Block>
struct PanelOfScaled {
  explicit PanelOfScaled(const Tile& tile)
      : block(tile.base),
        words(static_cast<const Word*>(tile.panel)),
        codes(static_cast<const char*>(tile.panel) + tile.k / block * kPanel * static_cast<int64_t>(sizeof(Word))) {}
  template <typename Each>
  [[gnu::always_inline]] void next(const Each& each) {
    Block::call(words, each);
    words += kPanel;
  }

  static constexpr int64_t lines = kLines;
  const int64_t block;
  const Word* words;
  const char* codes;
};

struct BlockOfInt4 {
  template <typename Each>
  [[gnu::always_inline]] static void call(const uint32_t* words, const Each& each) {
    each(BlockOfInt4{{}, Int4Scales(words)});
  }
  [[gnu::always_inline]] void all(const char* from, VecW (&weights)[4]) const {
    const VecU codes = (VecU)load_words(reinterpret_cast<const uint16_t*>(from));
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) weights[group] = numbers.of(codes, group, own);
  }

  Int4Numbers numbers;
  Int4Scales own;
};
using PanelOfInt4 = PanelOfScaled<uint32_t, 1, BlockOfInt4>;

struct BlockOfFp8 {
  template <typename Each>
  [[gnu::always_inline]] static void call(const float* scales, const Each& each) {
    each(Fp8Scales(scales));
  }
};
constexpr int64_t kFp8Lines = kGroupedWordK * kPanel / kLineBytes;
using PanelOfFp8 = PanelOfScaled<float, kFp8Lines, BlockOfFp8>;

struct BlockOfInt8 {
  template <typename Each>
  [[gnu::always_inline]] static void call(const float* scales, const Each& each) {
    each(Int8Scales(scales));
  }
};
using PanelOfInt8 = PanelOfScaled<float, kGroupedWordK * kPanel / kLineBytes, BlockOfInt8>;

// Where the next panel is not asked for, the core brings a panel's lines by itself, but none beyond the page that it reads:
// lines are asked for so far ahead.
constexpr int64_t kPageBytes = 4096;

template <typename Product, typename Panel, int M>
struct TileGrouped {
  static void run(const Tile& tile) {
    VecF acc[M][kVectors];
    begin_block(acc, tile, 0);
    Panel panel(tile);
    const char* from = panel.codes;
    Left<M> left(tile);
    Prefetch prefetch(tile, 0);
    prefetch.step *= 2, prefetch.other_step *= 2;
    auto* kept = static_cast<typename Product::Kept*>(tile.kept);
    const char* beyond = from + kPageBytes;
    const int64_t line = tile.ahead.step == 0 ? kLineBytes : 0;
    for (int64_t first = 0; first < tile.k; first += panel.block)
      panel.next([&](const auto& numbers) __attribute__((always_inline)) {
        for (int64_t k = 0; k < panel.block; k += kGroupedWordK) {
          prefetch.advance();
#pragma GCC unroll 2
          for (int i = 0; i < Panel::lines; ++i) {
            __builtin_prefetch(beyond, 0, 3);
            beyond += line;
          }
          VecW weights[4];
          numbers.all(from, weights);
          Product::add(acc, left, weights, kept);
          from += Panel::lines * kLineBytes;
          left.advance(kGroupedWordK * Product::kRowBytes);
        }
      });
    end_block(acc, tile, 0);
  }
};

}  // namespace
}  // namespace sgl_batch
