#include "head_linear.h"

#include <algorithm>

#include "packing.h"
#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {

// A task is one head and a block of rows, which meet every panel of the head's weight.
void run_head_linear(const HeadLinearCall& c) {
  if (c.rows == 0) return;
  const Isa& kernels = isa();
  const DType row_dtype = kernels.row_dtype(c.w_dtype);
  const TileFn tile_fn = kernels.tile(c.w_dtype);
  const int64_t block_rows = kTilesPerBlock * kernels.max_rows, blocks = divide_up(c.rows, block_rows);
  const int64_t panels = divide_up(c.n, kPanel), k_per_step = c.w_dtype == DType::kBf16 ? 2 : 1;
  const int64_t x_bytes = static_cast<int64_t>(size_of(c.dtype)), a_row = c.k * static_cast<int64_t>(size_of(row_dtype));
  const size_t panel_bytes = size_of(c.w_dtype) * kPanel * c.k;
  const bool in_place = row_dtype == c.dtype;
  Carver one;
  const size_t rows_at = one.take(in_place ? 0 : static_cast<size_t>(a_row * block_rows));
  const size_t spare_at = one.take(panel_bytes);
  static thread_local Workspace workspace;
  char* base = static_cast<char*>(workspace.at_least(one.total() * num_threads()));
  run_tasks(c.heads * blocks, [&](int64_t task, int thread) {
    const int64_t head = task / blocks, block = task % blocks;
    const Tiles tiles(c.rows * block / blocks, c.rows * (block + 1) / blocks, kernels.max_rows);
    char* scratch = base + one.total() * thread;
    const auto x_at = [&](int64_t row) { return static_cast<const char*>(c.x) + (row * c.x_row + head * c.x_head) * x_bytes; };
    if (!in_place)
      for (int64_t i = 0; i < tiles.rows; ++i)
        convert_row(scratch + rows_at + i * a_row, row_dtype, x_at(tiles.begin + i), c.dtype, c.k);
    const char* weight = static_cast<const char*>(c.w) + static_cast<size_t>(head * c.n * c.k) * size_of(c.w_dtype);
    alignas(64) float result[kMaxRows * kPanel];
    for (int64_t panel = 0; panel < panels; ++panel) {
      const void* columns = full_panel(weight, c.n, c.k, panel, c.w_dtype, scratch + spare_at);
      const char* next = weight + std::min(panel + 1, panels - 1) * panel_bytes;
      const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, c.n - column);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t row = tiles.at(tile);
        const int m = tiles.size(tile);
        const void* a = in_place ? x_at(row) : scratch + rows_at + (row - tiles.begin) * a_row;
        tile_fn({a, in_place ? c.x_row * x_bytes : a_row, columns, c.k, m, result, kPanel, false,
                 tiles.ahead(tile, next, c.k, k_per_step)});
        char* out = static_cast<char*>(c.out) + (row * c.out_row + head * c.out_head + column) * x_bytes;
        if (width == kPanel)
          kernels.store(result, kPanel, m, c.dtype, out, c.out_row * x_bytes);
        else
          for (int i = 0; i < m; ++i) write_row(out + i * c.out_row * x_bytes, c.dtype, result + i * kPanel, width);
      }
    }
  });
}

}  // namespace sgl_batch
