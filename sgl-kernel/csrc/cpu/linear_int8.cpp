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
        blocks_(divide_up(c_.rows, rows_per_block(kernel_.cut, c_.w.k))),
        keeps_rows_(kernel_.cut.row_blocks && blocks_ > 1),
        chunks_(divide_up(c_.w.panels(), panels_of_chunk())),
        element_(static_cast<int64_t>(size_of(c_.x_dtype))) {}

  void run() {
    Carver carver;
    const Int8RowsRoom rows_room(carver, c_.rows, c_.w.k, kernel_.cut.row_blocks);
    Carver one;
    spare_at_ = one.take(c_.w.spare_bytes());
    const int64_t block_rows = c_.w.k > kernel_.cut.best_k ? most_block_rows(c_.rows, blocks_, kernel_.cut) : 0;
    sums_at_ = one.take(sizeof(int32_t) * kPanel * static_cast<size_t>(block_rows));
    const size_t own_bytes = static_cast<size_t>(round_up(static_cast<int64_t>(one.total()), 4096));
    const size_t own_at = carver.take(own_bytes * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(carver.total()));
    carver.guard(base);
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(base + own_at + own_bytes * thread);
    rows_ = rows_room.in(base);
    round_rows(c_.x, c_.x_dtype, c_.w.k * element_, c_.rows, rows_);
    const int64_t tasks = chunks_ * blocks_;
    run_tasks_ahead(tasks, [&](int64_t task, int64_t next, int thread) {
      const Task after = task_of(std::min(next, tasks - 1));
      multiply(task_of(task), c_.w.panel(first_panel(after.chunk)), base + own_at + own_bytes * thread);
    });
  }

 private:
  struct Task {
    int64_t chunk, block;
  };

  // The blocks of one chunk come one after the other: its weights are then in the caches. Tiles that
  // take rows by blocks of k read weights so seldom that the chunks of one block do, instead.
  Task task_of(int64_t task) const {
    return keeps_rows_ ? Task{task % chunks_, task / chunks_} : Task{task / blocks_, task % blocks_};
  }

  int64_t panels_of_chunk() const {
    const int64_t panels = c_.w.panels();
    return keeps_rows_ ? panels_of_few_tasks(panels, blocks_) : panels_per_task(panels * blocks_, c_.w.panel_bytes());
  }

  int64_t block_begin(int64_t block) const { return sgl_batch::block_begin(c_.rows, block, blocks_, kernel_.cut); }
  int64_t first_panel(int64_t chunk) const { return c_.w.panels() * chunk / chunks_; }

  // A block of rows through a chunk of panels. `after`: the panel that this thread needs next. `own`: the thread's memory.
  void multiply(const Task& task, const uint8_t* after, char* own) const {
    const PackedInt8& w = c_.w;
    const int64_t begin = block_begin(task.block), last = first_panel(task.chunk + 1);
    const Tiles tiles(begin, block_begin(task.block + 1), kernel_.cut);
    const bool rows_pass = tiles.rows_pass(kernel_.cut);
    const KParts parts = tiles.parts(w.k, kernel_.cut, kRowBytes, rows_pass);
    const TileUse use(kernel_.release);
    auto* sums = reinterpret_cast<int32_t*>(own + sums_at_);
    alignas(64) float result[kMaxRows * kPanel];
    for (int64_t panel = first_panel(task.chunk); panel < last; ++panel) {
      const float* bias = c_.bias == nullptr ? nullptr : c_.bias + panel * kPanel;
      const Int8Panel ready(kernel_, w, panel, bias, reinterpret_cast<uint8_t*>(own + spare_at_));
      const uint8_t* next = panel + 1 < last ? w.panel(panel + 1) : after;
      for (int64_t part = 0; part < parts.count; ++part) {
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          const Int8TileOf of{.tiles = tiles, .tile = tile, .next_panel = next, .rows_pass = rows_pass};
          const int64_t row = tiles.at(tile);
          const int m = tiles.size(tile);
          char* out = static_cast<char*>(c_.out) + row * out_bytes() + panel * kPanel * element_;
          if (part + 1 == parts.count) fetch_rows_to_write(out, out_bytes(), m, static_cast<size_t>(kPanel * element_));
          if (parts.count == 1) {
            ready.multiply(rows_, of, result, kPanel);
          } else {
            int32_t* own_sums = sums + (row - begin) * kPanel;
            ready.add_up(rows_, of, parts.at(part), parts.length(part), own_sums);
            if (part + 1 < parts.count) continue;
            ready.finish(rows_, of, own_sums, result, kPanel);
          }
          store(panel, m, result, out);
        }
      }
    }
  }

  int64_t out_bytes() const { return c_.w.n * element_; }

  void store(int64_t panel, int m, const float* result, char* out) const {
    const int64_t width = c_.w.width(panel);
    if (width == kPanel)
      isa().store(result, kPanel, m, c_.x_dtype, out, out_bytes());
    else
      for (int i = 0; i < m; ++i) write_row(out + i * out_bytes(), c_.x_dtype, result + i * kPanel, width);
  }

  const LinearInt8Call& c_;
  const Int8Kernel& kernel_;
  const int64_t blocks_;
  const bool keeps_rows_;  // the tasks of a block of rows follow one another, so that these stay in the caches
  const int64_t chunks_, element_;
  size_t spare_at_ = 0, sums_at_ = 0;
  Int8Rows rows_{};
};

}  // namespace

void run_linear_int8(const LinearInt8Call& call) {
  if (call.rows > 0) LinearInt8(call).run();
}

}  // namespace sgl_batch
