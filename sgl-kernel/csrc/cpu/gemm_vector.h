// Owns the matrix kernels on the compiler's vector types, for one instruction set chosen by the including file, which
// sets the target before it includes anything and defines SGL_BATCH_LANES (floats of one vector) and SGL_BATCH_ROWS.
// No templates of the standard library here: the linker could hand their copies to code for lesser machines.
#pragma once

#include "coded_vector.h"
#include "fp4_vector.h"
#include "fp8_vector.h"
#include "gemm.h"
#include "int4_vector.h"
#include "int8_groups_vector.h"
#include "norm_rope_vector.h"
#include "page_rows_vector.h"
#include "rows_vector.h"
#include "topk_vector.h"

namespace sgl_batch {
namespace {

constexpr int kRows = SGL_BATCH_ROWS;
static_assert(kRows <= kMaxRows);
constexpr int kVectors = 2;  // vectors of columns that a block of accumulators is wide

// The rows of a tile's left side. Three share a pointer, so that twelve need four registers and one stride.
template <int M>
struct Left {
  static constexpr int kPointers = (M + 2) / 3;

  explicit Left(const Tile& tile) : stride(tile.a_stride) {
    for (int i = 0; i < kPointers; ++i) at[i] = static_cast<const char*>(tile.a) + 3 * i * stride;
  }
  template <typename Word>
  Word word(int row, int index = 0) const {
    typedef Word Unaligned __attribute__((aligned(1), may_alias));
    return reinterpret_cast<const Unaligned*>(at[row / 3] + (row % 3) * stride)[index];
  }
  void advance(int64_t bytes) {
#pragma GCC unroll 16
    for (int i = 0; i < kPointers; ++i) at[i] += bytes;
  }

  const char* at[kPointers];
  int64_t stride;
};

// The first pass over a panel brings what comes next closer, to the second cache: the first one has too few requests under
// way to read from memory at its rate. Later passes over other columns do not. Two lines in each step: both of the panel, or
// one of it and one of rows.
struct Prefetch {
  Prefetch(const Tile& tile, int column) {
    const Ahead ahead = column == 0 ? tile.ahead : Ahead{tile.panel, 0};
    panel = static_cast<const char*>(ahead.from);
    step = ahead.step;
    other = ahead.rows == nullptr ? panel + kLineBytes : static_cast<const char*>(ahead.rows);
    other_step = ahead.rows == nullptr ? step : ahead.rows_step;
  }
  void advance() {
    __builtin_prefetch(panel, 0, 2);
    __builtin_prefetch(other, 0, 2);
    panel += step;
    other += other_step;
  }

  const char* panel;
  const char* other;
  int64_t step, other_step;
};

template <int M, int vectors>
inline void begin_block(VecF (&acc)[M][vectors], const Tile& tile, int column) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
      acc[i][v] = tile.add ? load(tile.c + i * tile.c_stride + column + v * kLanes) : VecF{};
}

template <int M, int vectors>
inline void end_block(const VecF (&acc)[M][vectors], const Tile& tile, int column) {
  // Read anew here: kept in registers through the steps, they would leave too few for the rows' pointers.
  asm volatile("" ::: "memory");
  float* const c = tile.c + column;
  const int64_t stride = tile.c_stride;  // which for all the compiler knows a store may change
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(c + i * stride + v * kLanes, acc[i][v]);
}

template <int M>
struct TileF32 {
  static void run(const Tile& tile) {
    for (int column = 0; column < kPanel; column += kLanes * kVectors) {
      VecF acc[M][kVectors];
      begin_block(acc, tile, column);
      const float* b = static_cast<const float*>(tile.panel) + column;
      Left<M> left(tile);
      Prefetch prefetch(tile, column);
      for (int64_t step = 0; step < tile.k; ++step, b += kPanel, left.advance(4), prefetch.advance()) {
        VecF weight[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) weight[v] = load(b + v * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) acc[i][v] += weight[v] * left.template word<float>(i);
      }
      end_block(acc, tile, column);
    }
  }
};

// Weights of one step over two k, of the kLanes columns from `column` on. A bf16 pair lies in a 32-bit lane: its low half is the
// even k.
struct WeightsBf16 {
  static constexpr int64_t kBytes = 2;
  static void load(const char* step, int column, VecF& even, VecF& odd) {
    const VecU pair = *reinterpret_cast<const VecUU*>(step + 2 * kBytes * column);
    even = (VecF)(pair << 16);
    odd = (VecF)(pair & 0xffff0000u);
  }
};
struct WeightsI8 {
  static constexpr int64_t kBytes = 1;
  static void load(const char* step, int column, VecF& even, VecF& odd) {
    const Pairs pairs(reinterpret_cast<const int8_t*>(step + 2 * kBytes * column));
    even = pairs.first;
    odd = pairs.second;
  }
};
// What a tile has kept of others.
struct WeightsKept {
  static constexpr int64_t kBytes = 4;
  static void load(const char* step, int column, VecF& even, VecF& odd) {
    const auto* from = reinterpret_cast<const float*>(step) + column;
    even = sgl_batch::load(from);
    odd = sgl_batch::load(from + kPanel);
  }
};

// A tile of the first `columns`.
template <int M, typename Weights, int columns = kPanel>
struct TileOfPairs {
  static void run(const Tile& tile) {
    for (int column = 0; column < columns; column += kLanes * kWide) {
      VecF acc[M][kWide];
      begin_block(acc, tile, column);
      Left<M> left(tile);
      Prefetch prefetch(tile, column);
      auto* kept = static_cast<float*>(tile.kept);
      multiply(acc, tile.panel, tile.k, column, left, prefetch, kept == nullptr ? nullptr : kept + column);
      end_block(acc, tile, column);
    }
  }
  static void run(const Tile& tile, const void* second, int64_t second_k) {
    for (int column = 0; column < columns; column += kLanes * kWide) {
      VecF acc[M][kWide];
      begin_block(acc, tile, column);
      Left<M> left(tile);
      Prefetch prefetch(tile, column);
      multiply(acc, tile.panel, tile.k, column, left, prefetch, nullptr);
      multiply(acc, second, second_k, column, left, prefetch, nullptr);
      end_block(acc, tile, column);
    }
  }

 private:
  static constexpr int kWide = columns < kLanes * kVectors ? columns / kLanes : kVectors;

  [[gnu::always_inline]] static void multiply(VecF (&acc)[M][kWide], const void* panel, int64_t k, int column, Left<M>& left,
                                              Prefetch& prefetch, float* kept) {
    const char* b = static_cast<const char*>(panel);
    for (int64_t step = 0; step < k; step += 2, b += 2 * kPanel * Weights::kBytes, left.advance(8), prefetch.advance()) {
      VecF even[kWide], odd[kWide];
#pragma GCC unroll 4
      for (int v = 0; v < kWide; ++v) Weights::load(b, column + v * kLanes, even[v], odd[v]);
      if (kept != nullptr) {
#pragma GCC unroll 4
        for (int v = 0; v < kWide; ++v) store(kept + v * kLanes, even[v]), store(kept + kPanel + v * kLanes, odd[v]);
        kept += 2 * kPanel;
      }
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kWide; ++v) acc[i][v] += even[v] * left.template word<float>(i);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kWide; ++v) acc[i][v] += odd[v] * left.template word<float>(i, 1);
    }
  }
};

template <int M>
struct TileBf16 : TileOfPairs<M, WeightsBf16> {};
template <int M>
struct TileHalfBf16 : TileOfPairs<M, WeightsBf16, kPanel / 2> {};
template <int M>
struct TileI8 : TileOfPairs<M, WeightsI8> {};
template <int M>
struct TileKept : TileOfPairs<M, WeightsKept> {};
template <int M>
struct TileHalfKept : TileOfPairs<M, WeightsKept, kPanel / 2> {};

[[maybe_unused]] void widen_panel(const void* panel, int64_t steps, float* to) {
  const char* b = static_cast<const char*>(panel);
  for (int64_t step = 0; step < steps; ++step, b += kStepBytes, to += 2 * kPanel)
#pragma GCC unroll 8
    for (int column = 0; column < kPanel; column += kLanes) {
      VecF even, odd;
      WeightsBf16::load(b, column, even, odd);
      store(to + column, even);
      store(to + kPanel + column, odd);
    }
}

// One compiled kernel for each number of rows.
template <template <int> class Kernel, int M, typename... Others>
void by_rows(const Tile& tile, Others... others) {
  if constexpr (M > 1) {
    if (tile.m < M) return by_rows<Kernel, M - 1>(tile, others...);
  }
  Kernel<M>::run(tile, others...);
}

constexpr TileKernel kernel_of(TileFn run, TileFn run_i8 = nullptr, TileFn run_half = nullptr, TwoPanelsFn run_two = nullptr,
                               TileFn run_coded = nullptr, TileFn run_kept = nullptr, TileFn run_kept_half = nullptr,
                               TileFn run_fp4 = nullptr, TileFn run_int4 = nullptr, TileFn run_fp8 = nullptr,
                               TileFn run_int8_groups = nullptr) {
  return {.run = run,
          .run_i8 = run_i8,
          .run_half = run_half,
          .run_two = run_two,
          .run_coded = run_coded,
          .run_fp4 = run_fp4,
          .run_int4 = run_int4,
          .run_fp8 = run_fp8,
          .run_int8_groups = run_int8_groups,
          .run_kept = run_kept,
          .run_kept_half = run_kept_half,
          .cut = {.max_rows = kRows},
          .chained = true,
          .release = nullptr};
}

// Tiles whose rows are f32: weights are widened in registers.
constexpr TileKernel widening_kernel(TileFn run_coded = nullptr, TileFn run_fp4 = nullptr, TileFn run_int4 = nullptr,
                                     TileFn run_fp8 = nullptr, TileFn run_int8_groups = nullptr) {
  return kernel_of(by_rows<TileBf16, kRows>, by_rows<TileI8, kRows>, by_rows<TileHalfBf16, kRows>, by_rows<TileBf16, kRows>,
                   run_coded, by_rows<TileKept, kRows>, by_rows<TileHalfKept, kRows>, run_fp4, run_int4, run_fp8,
                   run_int8_groups);
}

// Everything but the tiles for pairs is the same for all instruction sets.
constexpr Isa isa_with(const char* name, bool bf16_pairs, const TileKernel& tile_bf16, SoftmaxStepFn softmax = softmax_step) {
  return {
      .name = name,
      .bf16_pairs = bf16_pairs,
      .tile_bf16 = tile_bf16,
      .tile_f32 = kernel_of(by_rows<TileF32, kRows>),
      .store = store_rows,
      .store_scaled = store_scaled,
      .silu_mul = silu_mul,
      .clamped_mul = clamped_mul,
      .softmax_step = softmax,
      .norm_row = norm_row,
      .rotate_head = rotate_head,
      .widen = widen,
      .widen_panel = widen_panel,
      .decode = decode_blocks,
      .decode_fp4 = decode_fp4,
      .decode_int4 = decode_int4,
      .decode_fp8 = decode_fp8,
      .decode_int8_groups = decode_int8_groups,
      .scale_columns = scale_columns,
      .choose = choose,
      .transpose_words = transpose_words,
      .zip_halves = zip_halves,
      .norm_rotate_heads = norm_rotate_heads,
  };
}

}  // namespace
}  // namespace sgl_batch
