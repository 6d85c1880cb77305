#include "linear_int8.h"

#include <algorithm>

#include "product_int8.h"
#include "rows.h"
#include "rows_int8.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

class LinearInt8 {
 public:
  explicit LinearInt8(const LinearInt8Call& call)
      : c_(call),
        kernel_(int8_kernel()),
        blocks_(divide_up(c_.rows, kTilesPerBlock * kernel_.max_rows)),
        chunks_(divide_up(c_.w.panels(), panels_per_task(c_.w.panels() * blocks_, c_.w.panel_bytes()))),
        element_(static_cast<int64_t>(size_of(c_.x_dtype))) {}

  void run() {
    Carver carver;
    const Int8RowsRoom rows_room(carver, c_.rows, c_.w.k);
    const size_t spare_at = carver.take(c_.w.spare_bytes() * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(carver.total()));
    carver.guard(base);
    rows_ = rows_room.in(base);
    round_rows(c_.x, c_.x_dtype, c_.w.k * element_, c_.rows, c_.w.k, rows_);
    // The blocks of one chunk come one after the other: its weights are then in the caches.
    const int64_t tasks = chunks_ * blocks_;
    run_tasks_ahead(tasks, [&](int64_t task, int64_t next, int thread) {
      const uint8_t* after = c_.w.panel(first_panel(std::min(next, tasks - 1) / blocks_));
      auto* spare = reinterpret_cast<uint8_t*>(base + spare_at) + c_.w.spare_bytes() * thread;
      multiply(task / blocks_, task % blocks_, after, spare);
    });
  }

 private:
  int64_t block_begin(int64_t block) const { return c_.rows * block / blocks_; }
  int64_t first_panel(int64_t chunk) const { return c_.w.panels() * chunk / chunks_; }

  // A block of rows through a chunk of panels. `after`: the panel that this thread needs next.
  void multiply(int64_t chunk, int64_t block, const uint8_t* after, uint8_t* spare) const {
    const PackedInt8& w = c_.w;
    const int64_t last = first_panel(chunk + 1);
    const Tiles tiles(block_begin(block), block_begin(block + 1), kernel_.max_rows);
    const TileUse use(kernel_.release);
    alignas(64) float result[kMaxRows * kPanel];
    for (int64_t panel = first_panel(chunk); panel < last; ++panel) {
      const Int8Panel ready(kernel_, w, panel, c_.bias == nullptr ? nullptr : c_.bias + panel * kPanel, spare);
      const uint8_t* next = panel + 1 < last ? w.panel(panel + 1) : after;
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t row = tiles.at(tile);
        const int m = tiles.size(tile);
        ready.multiply(rows_, row, m, tiles.ahead(tile, next, w.panel_bytes(), quad_steps(w.k)), result, kPanel);
        store(panel, row, m, result);
      }
    }
  }

  void store(int64_t panel, int64_t row, int m, const float* result) const {
    const int64_t column = panel * kPanel, width = c_.w.width(panel), out_bytes = c_.w.n * element_;
    char* out = static_cast<char*>(c_.out) + row * out_bytes + column * element_;
    if (width == kPanel)
      isa().store(result, kPanel, m, c_.x_dtype, out, out_bytes);
    else
      for (int i = 0; i < m; ++i) write_row(out + i * out_bytes, c_.x_dtype, result + i * kPanel, width);
  }

  const LinearInt8Call& c_;
  const Int8Kernel& kernel_;
  const int64_t blocks_, chunks_, element_;
  Int8Rows rows_{};
};

}  // namespace

void run_linear_int8(const LinearInt8Call& call) {
  if (call.rows > 0) LinearInt8(call).run();
}

}  // namespace sgl_batch
