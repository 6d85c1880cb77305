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
        w_(call.w),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(w_.dtype)),
        tile_(isa_.tile(w_.dtype)),
        blocks_(divide_up(c_.rows, kTilesPerBlock * isa_.max_rows)),
        chunks_(std::clamp<int64_t>(divide_up(kTasksPerThread * num_threads(), blocks_), 1, w_.panels())),
        row_bytes_(w_.k * static_cast<int64_t>(size_of(row_dtype_))),
        out_bytes_(w_.n * static_cast<int64_t>(size_of(c_.x_dtype))) {}

  void run() {
    const bool in_place = row_dtype_ == c_.x_dtype;
    Carver carver;
    const size_t rows_at = carver.take(in_place ? 0 : static_cast<size_t>(row_bytes_ * c_.rows));
    const size_t spare_at = carver.take(w_.spare_bytes() * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(carver.total()));
    rows_ = in_place ? static_cast<const char*>(c_.x) : base + rows_at;
    if (!in_place) run_tasks(blocks_, [&](int64_t block, int) { convert(block, base + rows_at); });
    // The blocks of one chunk come one after the other: its weights are then in the caches.
    run_tasks(chunks_ * blocks_, [&](int64_t task, int thread) {
      multiply(task % blocks_, task / blocks_, base + spare_at + w_.spare_bytes() * thread);
    });
  }

 private:
  int64_t block_begin(int64_t block) const { return c_.rows * block / blocks_; }

  void convert(int64_t block, char* rows) const {
    const int64_t x_bytes = w_.k * static_cast<int64_t>(size_of(c_.x_dtype));
    for (int64_t row = block_begin(block); row < block_begin(block + 1); ++row)
      convert_row(rows + row * row_bytes_, row_dtype_, static_cast<const char*>(c_.x) + row * x_bytes, c_.x_dtype, w_.k);
  }

  // A block of rows through a chunk of panels.
  void multiply(int64_t block, int64_t chunk, char* spare) const {
    const Tiles tiles(block_begin(block), block_begin(block + 1), isa_.max_rows);
    alignas(64) float result[kMaxRows * kPanel];
    for (int64_t panel = w_.panels() * chunk / chunks_; panel < w_.panels() * (chunk + 1) / chunks_; ++panel) {
      const void* ready = w_.ready(panel, isa_, spare);
      const char* next = w_.panel(std::min(panel + 1, w_.panels() - 1));
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int m = tiles.size(tile);
        tile_({rows_ + tiles.at(tile) * row_bytes_, row_bytes_, ready, w_.k, m, result, kPanel, false,
               tiles.ahead(tile, next, w_.panel_bytes(), tile_steps(w_.dtype, w_.k))});
        w_.scale(panel, isa_, result, kPanel, m);
        store(panel, tiles.at(tile), m, result);
      }
    }
  }

  void store(int64_t panel, int64_t row, int m, float* result) const {
    const int64_t column = panel * kPanel, width = w_.width(panel);
    if (c_.bias != nullptr)
      for (int i = 0; i < m; ++i) add_row(result + i * kPanel, c_.bias + column, width);
    char* out = static_cast<char*>(c_.out) + row * out_bytes_ + column * static_cast<int64_t>(size_of(c_.x_dtype));
    if (width == kPanel)
      isa_.store(result, kPanel, m, c_.x_dtype, out, out_bytes_);
    else
      for (int i = 0; i < m; ++i) write_row(out + i * out_bytes_, c_.x_dtype, result + i * kPanel, width);
  }

  const LinearCall& c_;
  const PackedWeight& w_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileFn tile_;
  const int64_t blocks_, chunks_, row_bytes_, out_bytes_;
  const char* rows_ = nullptr;
};

}  // namespace

void run_linear(const LinearCall& call) {
  if (call.rows > 0) Linear(call).run();
}

}  // namespace sgl_batch
