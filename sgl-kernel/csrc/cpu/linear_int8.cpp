#include "linear_int8.h"

#include <algorithm>

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
        chunks_(std::clamp<int64_t>(divide_up(kTasksPerThread * num_threads(), blocks_), 1, c_.w.panels())),
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
    run_tasks(chunks_ * blocks_, [&](int64_t task, int thread) {
      auto* spare = reinterpret_cast<uint8_t*>(base + spare_at) + c_.w.spare_bytes() * thread;
      multiply(task / blocks_, task % blocks_, spare);
    });
  }

 private:
  int64_t block_begin(int64_t block) const { return c_.rows * block / blocks_; }

  // A block of rows through a chunk of panels.
  void multiply(int64_t chunk, int64_t block, uint8_t* spare) const {
    const PackedInt8& w = c_.w;
    const Tiles tiles(block_begin(block), block_begin(block + 1), kernel_.max_rows);
    const TileUse use(kernel_.release);
    alignas(64) int32_t sums[kMaxRows * kPanel];
    for (int64_t panel = w.panels() * chunk / chunks_; panel < w.panels() * (chunk + 1) / chunks_; ++panel) {
      const uint8_t* ready = w.ready(panel, spare);
      const uint8_t* next = w.panel(std::min(panel + 1, w.panels() - 1));
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t row = tiles.at(tile), steps = quad_steps(w.k);
        const int m = tiles.size(tile);
        kernel_.run({rows_.row(row), rows_.stride, ready, steps, m, rows_.starts + row, sums,
                     tiles.ahead(tile, next, w.panel_bytes(), steps)});
        store(panel, row, m, sums);
      }
    }
  }

  void store(int64_t panel, int64_t row, int m, const int32_t* sums) const {
    alignas(64) float result[kMaxRows * kPanel];
    const int64_t column = panel * kPanel, width = c_.w.width(panel), out_bytes = c_.w.n * element_;
    const float* bias = c_.bias == nullptr ? nullptr : c_.bias + column;
    scale_sums(sums, m, width, {rows_.scales + row, c_.w.scales + column, bias}, result, kPanel);
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
