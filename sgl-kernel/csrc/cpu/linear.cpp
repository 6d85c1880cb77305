#include "linear.h"

#include <algorithm>

#include "packing.h"
#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {

void run_linear(const LinearCall& c) {
  if (c.rows == 0) return;
  const Isa& kernels = isa();
  const bool pairs = kernels.bf16_pairs && c.w_dtype == DType::kBf16;
  const TileFn tile_fn = c.w_dtype == DType::kBf16 ? kernels.tile_bf16 : kernels.tile_f32;
  const int64_t most = kernels.max_rows, tiles = divide_up(c.rows, most), blocks = divide_up(tiles, kTilesPerBlock);
  const int64_t panels = divide_up(c.n, kPanel);
  const int64_t chunks = std::clamp<int64_t>(divide_up(kTasksPerThread * num_threads(), blocks), 1, panels);
  const size_t tile_stride = (tile_bytes(c.k, kernels.max_rows, pairs) + 63) / 64 * 64;
  const size_t spare_bytes = size_of(c.w_dtype) * kPanel * c.k;
  const size_t x_row = static_cast<size_t>(c.k) * size_of(c.x_dtype), element = size_of(c.x_dtype);
  static thread_local Workspace workspace;
  char* packed = static_cast<char*>(workspace.at_least(tile_stride * tiles + spare_bytes * num_threads() + 64));
  char* spare = packed + tile_stride * tiles;
  const auto rows_of = [&](int64_t tile) { return static_cast<int>(std::min(most, c.rows - tile * most)); };

  run_tasks(tiles, [&](int64_t tile, int) {
    const void* rows[kMaxRows];
    for (int i = 0; i < rows_of(tile); ++i) rows[i] = static_cast<const char*>(c.x) + (tile * most + i) * x_row;
    pack_tile(rows, rows_of(tile), c.k, c.x_dtype, pairs, packed + tile * tile_stride);
  });
  run_tasks(blocks * chunks, [&](int64_t task, int thread) {
    const int64_t block = task / chunks, chunk = task % chunks;
    alignas(64) float result[kMaxRows * kPanel];
    for (int64_t panel = panels * chunk / chunks; panel < panels * (chunk + 1) / chunks; ++panel) {
      const void* weight = full_panel(c.w, c.n, c.k, panel, c.w_dtype, spare + spare_bytes * thread);
      const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, c.n - column);
      for (int64_t tile = block * kTilesPerBlock; tile < std::min(tiles, (block + 1) * kTilesPerBlock); ++tile) {
        tile_fn(packed + tile * tile_stride, weight, c.k, rows_of(tile), result);
        for (int i = 0; i < rows_of(tile); ++i) {
          float* row = result + i * kPanel;
          if (c.bias != nullptr) add_row(row, c.bias + column, width);
          write_row(static_cast<char*>(c.out) + ((tile * most + i) * c.n + column) * element, c.x_dtype, row, width);
        }
      }
    }
  });
}

}  // namespace sgl_batch
