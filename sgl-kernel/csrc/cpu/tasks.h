// Owns how large tasks are.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "gemm.h"
#include "task_shares.h"

namespace sgl_batch {

constexpr int64_t kTilesPerBlock = 8;  // rows that share one pass over a panel: they stay in the L2 cache
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kPanelTasksPerThread = 16;    // of tasks that go through panels: each looks ahead to the next one's
constexpr int64_t kPanelBytesPerTask = 256 << 10;  // with a block of rows they stay in the L2 cache

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// How large a core's second cache is, 1 or 2: no more than tasks were measured with, and no less where the system does not tell.
inline int64_t second_cache_mib() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t mib = std::clamp<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE) >> 20, 1, 2);
  return mib;
#else
  return 1;
#endif
}

// How many panels of one weight a task goes through, of `panels` for all tasks together.
inline int64_t panels_per_task(int64_t panels, int64_t panel_bytes) {
  const int64_t most = std::max<int64_t>(1, kPanelBytesPerTask / std::max<int64_t>(1, panel_bytes));
  return std::clamp<int64_t>(panels / (kPanelTasksPerThread * num_threads()), 1, most);
}

// How many of a weight's panels a task goes through where the rows of `blocks` stay in the caches: as many as leave tasks enough.
inline int64_t panels_of_few_tasks(int64_t panels, int64_t blocks) {
  return divide_up(panels, std::clamp<int64_t>(divide_up(kTasksPerThread * num_threads(), blocks), 1, panels));
}

// So few rows take less time than their panel takes from memory. Then a tile on AMD's cores asks for every other line alone: of a
// panel, which is long, they bring the lines between by themselves, and have not requests enough under way for more. Intel's do
// not bring them in time.
constexpr int64_t kFewRows = 4;
inline bool core_brings_lines_between() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Of a panel whose numbers a tile decodes, or of bytes that it multiplies with few rows, those cores bring all lines by themselves, as
// long as it meets one tile.
constexpr int64_t kFewInt8Rows = 8;
inline int64_t rows_without_lines(DType weight) { return has_groups(weight) ? kMaxRows : 0; }

// How many rows share one pass over a panel. Kernels that take rows by blocks need the fewest bytes of a panel for
// a product, and a coded panel is decoded once for all of them, so that more rows pay.
inline int64_t rows_per_block(const TileCut& cut, int64_t row_bytes, bool coded = false) {
  const int64_t tile = cut.usual_rows(), usual = kTilesPerBlock * tile;
  if (!cut.row_blocks && !coded) return usual;
  // Beside the next block's rows and the sums in the L2 cache. Kernels that take rows by blocks run where it has 2 MiB: half of that
  // pays where more rows save decoding.
  const int64_t bytes = (cut.row_blocks && coded ? 1024 : 512) << 10;
  const auto [least, most] = cut.row_blocks ? std::pair(usual / 2, 2 * usual) : std::pair(usual, 3 * usual);
  return std::clamp<int64_t>(bytes / row_bytes / tile * tile, least, most);
}

// How many rows each of `blocks` blocks has at most, and where one begins, or, with `blocks` for it, where the last one ends.
inline int64_t most_block_rows(int64_t rows, int64_t blocks, const TileCut& cut) {
  return round_up(divide_up(rows, blocks), cut.block_unit());
}
inline int64_t block_begin(int64_t rows, int64_t block, int64_t blocks, const TileCut& cut) {
  return block == blocks ? rows : round_up(rows * block / blocks, cut.block_unit());
}

// How rows lie: bytes from one row to the next, and from one line of a row to the next.
struct RowLayout {
  // One row after the other, or blocks of a line of all `rows`: a little apart, so that caches have room for one row's.
  static RowLayout plain(int64_t row_bytes) { return {row_bytes, kLineBytes}; }
  static RowLayout blocks(int64_t rows) { return {kLineBytes, round_up(rows * kLineBytes, 4096) + 2048}; }

  bool by_blocks() const { return block != kLineBytes; }
  // Where a line of a row begins, the one with the given byte of the row.
  int64_t at(int64_t number, int64_t byte) const { return number * row + byte / kLineBytes * block; }
  // Of so many rows, or of all those that lie by blocks.
  size_t room(int64_t rows, int64_t row_bytes) const {
    return static_cast<size_t>(by_blocks() ? divide_up(row_bytes, kLineBytes) * block : rows * row);
  }

  int64_t row, block;
};

// Has a tile bring closer, too, `count` rows that lie by blocks: a line of each while it meets a line of its own rows.
inline void bring_blocks(Ahead& ahead, const void* rows, int64_t count, const RowLayout& layout) {
  constexpr int64_t kSteps = kLineBytes / 4;  // a step reads 4 bytes of a row
  ahead.rows = rows;
  ahead.rows_step = divide_up(count * layout.row, kSteps);
  ahead.rows_block = layout.block;
}

// k cut into as few parts of at most `most` as there must be, each of whole lines with `line` numbers.
struct KParts {
  KParts(int64_t k, int64_t most, int64_t line)
      : k(k), size(round_up(divide_up(k, divide_up(k, most)), line)), count(divide_up(k, size)) {}
  int64_t at(int64_t part) const { return std::min(part * size, k); }
  int64_t length(int64_t part) const { return at(part + 1) - at(part); }

  int64_t k, size, count;
};

// Rows [begin, end) cut into as few tiles as there must be, all but equal ones, or full ones and a last one with the rest. A small
// rest is in a larger last tile where tiles are few, so that weights are read as rarely as can be, else shared by the last two.
constexpr int64_t kTilesWithLargeLast = 2;
struct Tiles {
  Tiles(int64_t first, int64_t last, const TileCut& cut)
      : begin(first),
        rows(last - first),
        count(cut.full_rows == 0 ? divide_up(rows, cut.max_rows) : count_of_full(cut)),
        full_rows(cut.full_rows) {}
  int64_t at(int64_t tile) const {
    if (tile == count) return begin + rows;
    if (full_rows == 0) return begin + rows * tile / count;
    const int64_t rest = rows - (count - 1) * full_rows;
    const bool shares = tile == count - 1 && count > kTilesWithLargeLast && 2 * rest <= full_rows;
    return begin + (shares ? rows - (full_rows + rest) / 2 : tile * full_rows);
  }
  // k is cut where a panel is read so often that it should stay in the first cache.
  KParts parts(int64_t k, const TileCut& cut, int64_t line = kBlockK, bool rows_pass = false) const {
    return {k, cut.cuts_k(count) ? (rows_pass ? cut.passing_k : cut.best_k) : kAnyK, line};
  }
  // Whether rows of so many tiles should pass by the first cache, where all of them meet one panel after the other.
  bool rows_pass(const TileCut& cut) const { return cut.passing_k != kAnyK && count >= kTilesOfPassingRows; }
  int size(int64_t tile) const { return static_cast<int>(at(tile + 1) - at(tile)); }

  // What the given tile, of `steps` steps over k, brings closer of `bytes` that follow from the step `first` on: together the
  // tiles bring them all. `alone`: how many rows of one tile ask for none of them where the core brings lines by itself.
  Ahead ahead(int64_t tile, const void* from, int64_t bytes, int64_t steps, int64_t first, int64_t alone) const {
    const int64_t step = divide_up(bytes, steps * count);
    const char* share = static_cast<const char*>(from) + (tile * steps + first) * step;
    if (full_rows == 0 && core_brings_lines_between()) {
      if (count == 1 && rows <= alone) return {share, 0};
      if (rows <= kFewRows && step == 2 * kLineBytes) return {share, step, share, step};
    }
    return {share, step};
  }

  // The same with `row_bytes` from `rows` on, where the panel leaves room for them.
  static Ahead with_rows(const Ahead& panel, const void* rows, int64_t row_bytes, int64_t steps) {
    if (panel.step > kLineBytes) return panel;
    return {panel.from, panel.step, rows, divide_up(row_bytes, steps)};
  }

  int64_t begin, rows, count, full_rows;

 private:
  int64_t count_of_full(const TileCut& cut) const {
    const int64_t few = std::max<int64_t>(1, divide_up(rows - (cut.max_rows - cut.full_rows), cut.full_rows));
    return few <= kTilesWithLargeLast ? few : divide_up(rows, cut.full_rows);
  }
};

// As long as it lives a task may use these tiles. What they set up on the thread is given back in the end, so that nobody
// else who runs on this thread later finds it.
class TileUse {
 public:
  explicit TileUse(const TileKernel& kernel) : TileUse(kernel.release) {}
  explicit TileUse(void (*release)()) : release_(release) {}
  TileUse(const TileUse&) = delete;
  TileUse& operator=(const TileUse&) = delete;
  ~TileUse() {
    if (release_ != nullptr) release_();
  }

 private:
  void (*const release_)();
};

}  // namespace sgl_batch
