#include "linear.h"

#include <algorithm>
#include <cstring>

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
        element_(static_cast<int64_t>(size_of(c_.x_dtype))),
        row_element_(static_cast<int64_t>(size_of(row_dtype_))),
        row_bytes_(c_.w.k * row_element_),
        blocks_(divide_up(c_.rows, rows_per_block(tile_.cut, 2 * c_.w.k, has_groups(c_.w.dtype)))),
        crowded_(!tile_.cut.row_blocks && c_.rows > tile_.cut.max_rows &&
                 row_stride(c_.x_row * element_) != c_.x_row * element_),
        converts_(row_dtype_ != c_.x_dtype && blocks_ >= kTasksPerThread * num_threads()),
        in_place_(converts_ || (row_dtype_ == c_.x_dtype && !(crowded_ && blocks_ == 1))),
        stride_(in_place_ ? c_.x_row * element_ : row_stride(row_bytes_)),
        spread_(in_place_ && blocks_ > 1 && (tile_.cut.row_blocks || crowded_ || converts_)),
        chunks_(divide_up(c_.w.panels(), panels_per_task())) {}

  void run() {
    Carver carver;
    const size_t rows_at = carver.take(in_place_ ? 0 : static_cast<size_t>(stride_ * c_.rows * c_.heads));
    Carver one;
    spare_at_ = one.take(c_.w.spare_bytes(isa_));
    const int64_t block_rows = most_block_rows(c_.rows, blocks_, tile_.cut);
    const RowLayout layout = layout_of(block_rows);
    spread_at_ = one.take(spread_ ? layout.room(block_rows, row_bytes_) : 0);
    row_at_ = one.take(spread_ ? static_cast<size_t>(row_bytes_) : 0);
    results_at_ = one.take(sizeof(float) * kPanel * static_cast<size_t>(block_rows + tile_.cut.max_rows));
    const size_t own_bytes = static_cast<size_t>(round_up(static_cast<int64_t>(one.total()), 4096));
    const size_t own_at = carver.take(own_bytes * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(carver.total()));
    carver.guard(base);
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(base + own_at + own_bytes * thread);
    converted_ = base + rows_at;
    if (!in_place_) run_tasks(c_.heads * blocks_, [this](int64_t task, int) { convert(task / blocks_, task % blocks_); });
    const int64_t tasks = c_.heads * chunks_ * blocks_;
    run_tasks_ahead(tasks, [&](int64_t task, int64_t next, int thread) {
      const Task own = task_of(task), after = task_of(std::min(next, tasks - 1));
      multiply(own, of_head(after.head).panel(first_panel(after.chunk)), base + own_at + own_bytes * thread);
    });
  }

 private:
  struct Task {
    int64_t head, chunk, block;
  };

  // The blocks of one chunk come one after the other: its weights are then in the caches. A block that is copied is, instead, for
  // as many panels as there are tasks left for.
  Task task_of(int64_t task) const {
    const int64_t head = task / (chunks_ * blocks_), own = task % (chunks_ * blocks_);
    return spread_ ? Task{head, own % chunks_, own / chunks_} : Task{head, own / blocks_, own % blocks_};
  }

  int64_t panels_per_task() const {
    const int64_t panels = c_.w.panels();
    if (spread_) return panels_of_few_tasks(panels, blocks_ * c_.heads);
    return sgl_batch::panels_per_task(panels * blocks_ * c_.heads, c_.w.panel_bytes());
  }

  // How a block's rows lie when they meet weights.
  RowLayout layout_of(int64_t rows) const {
    if (!spread_) return RowLayout::plain(stride_);
    return tile_.cut.row_blocks ? RowLayout::blocks(rows) : RowLayout::plain(row_stride(row_bytes_));
  }

  int64_t block_begin(int64_t block) const { return sgl_batch::block_begin(c_.rows, block, blocks_, tile_.cut); }
  const char* given(int64_t head, int64_t row) const {
    return static_cast<const char*>(c_.x) + (row * c_.x_row + head * c_.x_head) * element_;
  }
  char* converted(int64_t head, int64_t row) const { return converted_ + (head * c_.rows + row) * stride_; }

  void convert(int64_t head, int64_t block) const {
    for (int64_t row = block_begin(block); row < block_begin(block + 1); ++row)
      convert_row(converted(head, row), row_dtype_, given(head, row), c_.x_dtype, c_.w.k);
  }

  int64_t first_panel(int64_t chunk) const { return c_.w.panels() * chunk / chunks_; }

  PackedWeight of_head(int64_t head) const {
    PackedWeight w = c_.w;
    w.data = static_cast<const char*>(w.data) + packed_bytes(w.dtype, head * w.n * w.k);
    return w;
  }

  // A block of a head's rows through a chunk of its panels. `after`: the panel that this thread needs next.
  void multiply(const Task& task, const char* after, char* own) const {
    const PackedWeight w = of_head(task.head);
    const int64_t begin = block_begin(task.block), last = first_panel(task.chunk + 1);
    const Tiles tiles(begin, block_begin(task.block + 1), tile_.cut);
    const RowLayout layout = layout_of(tiles.rows);
    const bool rows_pass = layout.by_blocks() && tiles.rows_pass(tile_.cut);
    const KParts parts = tiles.parts(w.k, tile_.cut, kBlockK, rows_pass);
    const TileUse use(tile_);
    auto* results = reinterpret_cast<float*>(own + results_at_);
    const char* rows = in_place_ ? given(task.head, begin) : converted(task.head, begin);
    if (spread_) rows = spread(task.head, tiles, layout, own + spread_at_, own + row_at_);
    for (int64_t panel = first_panel(task.chunk); panel < last; ++panel) {
      ReadyPanel ready = w.ready(panel, isa_, own + spare_at_, tiles.count);
      ready.rows_pass = rows_pass;
      const char* next = panel + 1 < last ? w.panel(panel + 1) : after;
      for (int64_t part = 0; part < parts.count; ++part) {
        const int64_t k = parts.at(part);
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          const int64_t row = tiles.at(tile) - begin;
          const int m = tiles.size(tile);
          // The sums of one tile alone stay in one place.
          float* result = results + (parts.count > 1 ? row * kPanel : 0);
          char* out = output(task.head, panel, begin + row);
          if (part + 1 == parts.count) fetch_rows_to_write(out, out_bytes(), m, static_cast<size_t>(kPanel * element_));
          const Ahead ahead = tiles.ahead(tile, next, w.panel_bytes(), tile_steps(w.dtype, w.k), tile_steps(w.dtype, k),
                                            rows_without_lines(w.dtype));
          ready.multiply({rows + layout.at(row, k * row_element_), layout.row, ready.from(k), parts.length(part), m, result, kPanel,
                          part > 0, ahead, layout.block});
          if (part + 1 < parts.count) continue;
          w.scale(panel, isa_, result, kPanel, m);
          store(panel, m, result, out);
        }
      }
    }
  }

  // The rows by blocks of k, as weights meet them, or only further apart. `one`: room for a converted row.
  const char* spread(int64_t head, const Tiles& tiles, const RowLayout& layout, char* to, char* one) const {
    for (int64_t row = 0; row < tiles.rows; ++row) {
      if (row + 1 < tiles.rows) fetch(given(head, tiles.begin + row + 1), static_cast<size_t>(c_.w.k * element_));
      const char* from = given(head, tiles.begin + row);
      if (!layout.by_blocks()) {
        convert_row(to + layout.at(row, 0), row_dtype_, from, c_.x_dtype, c_.w.k);
        continue;
      }
      if (converts_) convert_row(one, row_dtype_, from, c_.x_dtype, c_.w.k);
      spread_row(to + layout.at(row, 0), layout.block, converts_ ? one : from, row_bytes_);
    }
    return to;
  }

  int64_t out_bytes() const { return c_.out_row * element_; }
  char* output(int64_t head, int64_t panel, int64_t row) const {
    return static_cast<char*>(c_.out) + row * out_bytes() + (head * c_.out_head + panel * kPanel) * element_;
  }

  void store(int64_t panel, int m, float* result, char* out) const {
    const int64_t width = c_.w.width(panel);
    if (c_.bias != nullptr)
      for (int i = 0; i < m; ++i) add_row(result + i * kPanel, c_.bias + panel * kPanel, width);
    if (width == kPanel)
      isa_.store(result, kPanel, m, c_.x_dtype, out, out_bytes());
    else
      for (int i = 0; i < m; ++i) write_row(out + i * out_bytes(), c_.x_dtype, result + i * kPanel, width);
  }

  const LinearCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;
  const int64_t element_, row_element_, row_bytes_, blocks_;
  const bool crowded_;   // rows lie so that a tile's would share a place in the caches
  const bool converts_;  // each task converts its rows: there are blocks enough for tasks of whole ones
  const bool in_place_;  // rows are not converted before: they meet weights as given, or each task copies them
  const int64_t stride_;  // from row to row, as given or converted
  const bool spread_;    // each task copies its rows, by blocks of k, further apart or in another number type
  const int64_t chunks_;
  size_t spare_at_ = 0, spread_at_ = 0, row_at_ = 0, results_at_ = 0;
  char* converted_ = nullptr;
};

}  // namespace

void run_linear(const LinearCall& call) {
  if (call.rows > 0) Linear(call).run();
}

}  // namespace sgl_batch
