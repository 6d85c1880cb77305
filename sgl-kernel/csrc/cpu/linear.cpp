#include "linear.h"

#include <algorithm>

#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

class Linear {
 public:
  explicit Linear(const LinearCall& call)
      : c_(call),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(c_.w.dtype)),
        tile_(isa_.tile(c_.w.dtype)),
        in_place_(row_dtype_ == c_.x_dtype),
        blocks_(divide_up(c_.rows, kTilesPerBlock * tile_.max_rows)),
        chunks_(divide_up(c_.w.panels(), panels_per_task(c_.w.panels() * blocks_ * c_.heads, c_.w.panel_bytes()))),
        element_(static_cast<int64_t>(size_of(c_.x_dtype))),
        row_bytes_(c_.w.k * static_cast<int64_t>(size_of(row_dtype_))) {}

  void run() {
    Carver carver;
    const size_t rows_at = carver.take(in_place_ ? 0 : static_cast<size_t>(row_bytes_ * c_.rows * c_.heads));
    const size_t spare_at = carver.take(c_.w.spare_bytes() * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(carver.total()));
    carver.guard(base);
    converted_ = base + rows_at;
    if (!in_place_) run_tasks(c_.heads * blocks_, [this](int64_t task, int) { convert(task / blocks_, task % blocks_); });
    // The blocks of one chunk come one after the other: its weights are then in the caches.
    const int64_t tasks = c_.heads * chunks_ * blocks_;
    run_tasks_ahead(tasks, [&](int64_t task, int64_t next, int thread) {
      const int64_t after = std::min(next, tasks - 1) / blocks_;
      multiply(task / blocks_ / chunks_, task / blocks_ % chunks_, task % blocks_,
               of_head(after / chunks_).panel(first_panel(after % chunks_)), base + spare_at + c_.w.spare_bytes() * thread);
    });
  }

 private:
  int64_t block_begin(int64_t block) const { return c_.rows * block / blocks_; }
  const char* given(int64_t head, int64_t row) const {
    return static_cast<const char*>(c_.x) + (row * c_.x_row + head * c_.x_head) * element_;
  }
  char* converted(int64_t head, int64_t row) const { return converted_ + (head * c_.rows + row) * row_bytes_; }

  void convert(int64_t head, int64_t block) const {
    for (int64_t row = block_begin(block); row < block_begin(block + 1); ++row)
      convert_row(converted(head, row), row_dtype_, given(head, row), c_.x_dtype, c_.w.k);
  }

  int64_t first_panel(int64_t chunk) const { return c_.w.panels() * chunk / chunks_; }

  PackedWeight of_head(int64_t head) const {
    PackedWeight w = c_.w;
    w.data = static_cast<const char*>(w.data) + static_cast<size_t>(head * w.n * w.k) * size_of(w.dtype);
    return w;
  }

  // A block of a head's rows through a chunk of its panels. `after`: the panel that this thread needs next.
  void multiply(int64_t head, int64_t chunk, int64_t block, const char* after, char* spare) const {
    const PackedWeight w = of_head(head);
    const int64_t last = first_panel(chunk + 1);
    const Tiles tiles(block_begin(block), block_begin(block + 1), tile_.max_rows);
    const TileUse use(tile_);
    alignas(64) float result[kMaxRows * kPanel];
    for (int64_t panel = first_panel(chunk); panel < last; ++panel) {
      const ReadyPanel ready = w.ready(panel, isa_, spare, tiles.count);
      const char* next = panel + 1 < last ? w.panel(panel + 1) : after;
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t row = tiles.at(tile);
        const int m = tiles.size(tile);
        ready.tile({in_place_ ? given(head, row) : converted(head, row), in_place_ ? c_.x_row * element_ : row_bytes_, ready.data, w.k, m,
               result, kPanel, false, tiles.ahead(tile, next, w.panel_bytes(), tile_steps(w.dtype, w.k))});
        w.scale(panel, isa_, result, kPanel, m);
        store(head, panel, row, m, result);
      }
    }
  }

  void store(int64_t head, int64_t panel, int64_t row, int m, float* result) const {
    const int64_t column = panel * kPanel, width = c_.w.width(panel), out_bytes = c_.out_row * element_;
    if (c_.bias != nullptr)
      for (int i = 0; i < m; ++i) add_row(result + i * kPanel, c_.bias + column, width);
    char* out = static_cast<char*>(c_.out) + row * out_bytes + (head * c_.out_head + column) * element_;
    if (width == kPanel)
      isa_.store(result, kPanel, m, c_.x_dtype, out, out_bytes);
    else
      for (int i = 0; i < m; ++i) write_row(out + i * out_bytes, c_.x_dtype, result + i * kPanel, width);
  }

  const LinearCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;
  const bool in_place_;  // rows meet weights in their own number type
  const int64_t blocks_, chunks_, element_, row_bytes_;
  char* converted_ = nullptr;
};

}  // namespace

void run_linear(const LinearCall& call) {
  if (call.rows > 0) Linear(call).run();
}

}  // namespace sgl_batch
