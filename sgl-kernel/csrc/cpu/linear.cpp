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
  const DType row_dtype = kernels.row_dtype(c.w_dtype);
  const TileFn tile_fn = kernels.tile(c.w_dtype);
  const int64_t blocks = divide_up(c.rows, kTilesPerBlock * kernels.max_rows), panels = divide_up(c.n, kPanel);
  const int64_t chunks = std::clamp<int64_t>(divide_up(kTasksPerThread * num_threads(), blocks), 1, panels);
  const int64_t k_per_step = c.w_dtype == DType::kBf16 ? 2 : 1;
  const bool in_place = row_dtype == c.x_dtype;
  const size_t x_row = static_cast<size_t>(c.k) * size_of(c.x_dtype), a_row = static_cast<size_t>(c.k) * size_of(row_dtype);
  const size_t panel_bytes = size_of(c.w_dtype) * kPanel * c.k, out_row = static_cast<size_t>(c.n) * size_of(c.x_dtype);
  Carver carver;
  const size_t rows_at = carver.take(in_place ? 0 : a_row * c.rows);
  const size_t spare_at = carver.take(panel_bytes * num_threads());
  static thread_local Workspace workspace;
  char* base = static_cast<char*>(workspace.at_least(carver.total()));
  const char* a = in_place ? static_cast<const char*>(c.x) : base + rows_at;
  const auto block_begin = [&](int64_t block) { return c.rows * block / blocks; };

  if (!in_place)
    run_tasks(blocks, [&](int64_t block, int) {
      for (int64_t row = block_begin(block); row < block_begin(block + 1); ++row)
        convert_row(base + rows_at + row * a_row, row_dtype, static_cast<const char*>(c.x) + row * x_row, c.x_dtype, c.k);
    });
  // The blocks of one chunk come one after the other: its weights are then in the caches.
  run_tasks(chunks * blocks, [&](int64_t task, int thread) {
    const int64_t chunk = task / blocks, block = task % blocks;
    const Tiles tiles(block_begin(block), block_begin(block + 1), kernels.max_rows);
    alignas(64) float result[kMaxRows * kPanel];
    for (int64_t panel = panels * chunk / chunks; panel < panels * (chunk + 1) / chunks; ++panel) {
      const void* weight = full_panel(c.w, c.n, c.k, panel, c.w_dtype, base + spare_at + panel_bytes * thread);
      const char* next = static_cast<const char*>(c.w) + std::min(panel + 1, panels - 1) * panel_bytes;
      const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, c.n - column);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int m = tiles.size(tile);
        tile_fn({a + tiles.at(tile) * a_row, static_cast<int64_t>(a_row), weight, c.k, m, result, kPanel, false,
                 tiles.ahead(tile, next, c.k, k_per_step)});
        if (c.bias != nullptr)
          for (int i = 0; i < m; ++i) add_row(result + i * kPanel, c.bias + column, width);
        char* out = static_cast<char*>(c.out) + tiles.at(tile) * out_row + static_cast<size_t>(column) * size_of(c.x_dtype);
        if (width == kPanel)
          kernels.store(result, kPanel, m, c.x_dtype, out, static_cast<int64_t>(out_row));
        else
          for (int i = 0; i < m; ++i) write_row(out + i * out_row, c.x_dtype, result + i * kPanel, width);
      }
    }
  });
}

}  // namespace sgl_batch
