// Owns how the AMX tiles of rows, panels and sums lie, whatever their numbers are: 16 steps over k are a block, of which a
// step has 4 bytes of each row and column. For the files of the AMX kernels, each with a configuration of its own.
//
// The configuration belongs to the thread, where others want their own (oneDNN, which torch uses, has AMX kernels too).
// It is loaded by the first tile of a task and where the number of rows changes, since loading costs as much as several
// steps, and is released at the task's end: others find tiles as if nobody had used them, and no task trusts what it did
// not load itself.
#pragma once

#if defined(__x86_64__)
#include <initializer_list>

#include "amx_tiles.h"
#include "gemm.h"

namespace sgl_batch {
namespace {

constexpr int kSteps = kTileRows;  // of a block
constexpr int kWord = 4;           // bytes of a step, of a row or a column: also of a sum
static_assert(kSteps * kWord == kTileRowBytes && kPanel * kWord == 2 * kTileRowBytes && kMaxRows == 2 * kTileRows);
static_assert(kStepBytes == kPanel * kWord);

// Tiles 0 to 3: sums, of the first and the second 16 rows by the first and the second 16 columns. 4 and 5: those rows of
// a. 6 and 7: those columns of the panel.
inline TileConfig config_for(int rows) {
  TileConfig config;
  const auto set = [&config](int tile, int count) {
    config.rows[tile] = static_cast<uint8_t>(count);
    config.row_bytes[tile] = static_cast<uint16_t>(count > 0 ? kTileRowBytes : 0);
  };
  const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
  for (const int tile : {0, 1, 4}) set(tile, first);
  for (const int tile : {2, 3, 5}) set(tile, second);
  for (const int tile : {6, 7}) set(tile, kSteps);
  return config;
}

thread_local int configured_rows = 0;  // by this task

inline void configure(int rows) {
  if (configured_rows == rows) return;
  configure_tiles(config_for(rows));
  configured_rows = rows;
}

inline void release() {
  release_tiles();
  configured_rows = 0;
}

// Brings what comes next closer. To the second cache: a panel is more than the first one holds.
struct BlockPrefetch {
  explicit BlockPrefetch(const Ahead& ahead)
      : at(static_cast<const char*>(ahead.from)),
        rows(static_cast<const char*>(ahead.rows)),
        bytes(ahead.step * kSteps),
        row_bytes(ahead.rows == nullptr ? 0 : ahead.rows_step * kSteps),
        row_block(ahead.rows_block == 0 ? row_bytes : ahead.rows_block) {}
  void advance() {
    for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(at + i, 0, 2);
    for (int64_t i = 0; i < row_bytes; i += kLineBytes) __builtin_prefetch(rows + i, 0, 2);
    at += bytes;
    rows += row_block;
  }

  const char* at;
  const char* rows;
  int64_t bytes, row_bytes, row_block;
};

template <bool two>
void zero_sums() {
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (two) zero_tile<2>();
  if constexpr (two) zero_tile<3>();
}

// Rows of sums, kPanel words each, begin `stride` bytes apart.
template <bool two>
void load_sums(const void* from, int64_t stride) {
  const auto* c = static_cast<const char*>(from);
  load_tile<0>(c, stride);
  load_tile<1>(c + kTileRowBytes, stride);
  if constexpr (two) load_tile<2>(c + kTileRows * stride, stride);
  if constexpr (two) load_tile<3>(c + kTileRows * stride + kTileRowBytes, stride);
}

template <bool two>
void store_sums(void* to, int64_t stride) {
  auto* c = static_cast<char*>(to);
  store_tile<0>(c, stride);
  store_tile<1>(c + kTileRowBytes, stride);
  if constexpr (two) store_tile<2>(c + kTileRows * stride, stride);
  if constexpr (two) store_tile<3>(c + kTileRows * stride + kTileRowBytes, stride);
}

// Product: the instruction, as a template over its three tiles.
template <bool two, typename Product>
inline void multiply_block(const void* rows, int64_t stride, const void* columns) {
  const auto* a = static_cast<const char*>(rows);
  const auto* panel = static_cast<const char*>(columns);
  load_tile<6>(panel, kStepBytes);
  load_tile<4>(a, stride);
  Product::template multiply<0, 4, 6>();
  load_tile<7>(panel + kTileRowBytes, kStepBytes);
  Product::template multiply<1, 4, 7>();
  if constexpr (two) {
    load_tile<5>(a + kTileRows * stride, stride);
    Product::template multiply<2, 5, 6>();
    Product::template multiply<3, 5, 7>();
  }
}

}  // namespace
}  // namespace sgl_batch
#endif
