// Owns how the AMX tiles of rows, panels and sums lie, whatever their numbers are: 16 steps over k are a block, of which a
// step has 4 bytes of each row and column. For the files of the AMX kernels, each with a configuration of its own.
//
// The configuration belongs to the thread, where others want their own (oneDNN, which torch uses, has AMX kernels too).
// It is loaded by the first tile of a task and where the number of rows changes, since loading costs as much as several
// steps, and is released at the task's end: others find tiles as if nobody had used them, and no task trusts what it did
// not load itself.
#pragma once

#if defined(__x86_64__)
#include <initializer_list>

#include "amx_tiles.h"
#include "gemm.h"

namespace sgl_batch {
namespace {

constexpr int kSteps = kTileRows;  // of a block
constexpr int kWord = 4;           // bytes of a step, of a row or a column: also of a sum
static_assert(kSteps * kWord == kTileRowBytes && kPanel * kWord == 2 * kTileRowBytes && kMaxRows == 3 * kTileRows);
static_assert(kStepBytes == kPanel * kWord);

constexpr int kTwoTiles = 2 * kTileRows;  // rows of which two tiles hold 16 and the rest; more are cut into three equal tiles

// Rows of each of three equal tiles. If these have more rows than there are, the third begins within the second, and what both
// have is computed twice, to the same bits.
inline int third_of(int rows) { return (rows + 2) / 3; }

// Tiles 0 to 3: sums, of the first and the second 16 rows by the first and the second 16 columns. 4 and 5: those rows of
// a. 6 and 7: those columns of the panel. With three tiles of rows 4 and 5 are sums, too, 6 is for rows and 7 for columns.
inline TileConfig config_for(int rows) {
  TileConfig config;
  const auto set = [&config](int tile, int count) {
    config.rows[tile] = static_cast<uint8_t>(count);
    config.row_bytes[tile] = static_cast<uint16_t>(count > 0 ? kTileRowBytes : 0);
  };
  if (rows > kTwoTiles) {
    for (const int tile : {0, 1, 2, 3, 4, 5, 6}) set(tile, third_of(rows));
    set(7, kSteps);
    return config;
  }
  const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
  for (const int tile : {0, 1, 4}) set(tile, first);
  for (const int tile : {2, 3, 5}) set(tile, second);
  for (const int tile : {6, 7}) set(tile, kSteps);
  return config;
}

thread_local int configured_rows = 0;  // by this task

inline bool configured_whole() { return configured_rows == kTwoTiles; }

// Tiles that are configured whole stay so for all rows that fill one: to load a configuration takes longer than rows that are
// computed twice, see Starts.
inline void configure(int rows) {
  if (configured_rows == rows || (configured_whole() && rows >= kTileRows)) return;
  configure_tiles(config_for(rows));
  configured_rows = rows;
}

inline void release() {
  release_tiles();
  configured_rows = 0;
}

// Brings what comes next closer. To the second cache: a panel is more than the first one holds.
struct BlockPrefetch {
  explicit BlockPrefetch(const Ahead& ahead)
      : at(static_cast<const char*>(ahead.from)),
        rows(static_cast<const char*>(ahead.rows)),
        bytes(ahead.step * kSteps),
        row_bytes(ahead.rows == nullptr ? 0 : ahead.rows_step * kSteps),
        row_block(ahead.rows_block == 0 ? row_bytes : ahead.rows_block) {}
  void advance() {
    for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(at + i, 0, 2);
    for (int64_t i = 0; i < row_bytes; i += kLineBytes) __builtin_prefetch(rows + i, 0, 2);
    at += bytes;
    rows += row_block;
  }

  const char* at;
  const char* rows;
  int64_t bytes, row_bytes, row_block;
};

// How a tile's rows are held: by one, two or three tiles of rows, each by two of columns.
enum class Hold { kOne, kTwo, kThree };
inline Hold hold_of(int rows) { return rows > kTwoTiles ? Hold::kThree : rows > kTileRows ? Hold::kTwo : Hold::kOne; }

// Where the second and the third tile of so many rows begin, as tiles are configured. The last one ends with the rows: where it is
// whole, it begins within the one before.
template <Hold hold>
struct Starts {
  explicit Starts(int rows)
      : second(hold == Hold::kThree ? each_of_three(rows) : configured_whole() ? rows - kTileRows : kTileRows),
        third(hold == Hold::kThree ? rows - each_of_three(rows) : 0) {}
  const int64_t second, third;

 private:
  static int each_of_three(int rows) { return configured_whole() ? kTileRows : third_of(rows); }
};

// How many of a panel's columns are met: all, by two tiles, or the first half.
enum class Width { kHalf, kWhole };

// Calls act.operator()<tile>(where it lies) for each tile of sums. Rows, kPanel words each, begin `stride` bytes apart.
template <Width width, Hold hold, typename Act>
inline void each_sum(void* c, int64_t stride, const Starts<hold>& starts, const Act& act) {
  const auto of_rows = [&]<int tile>(char* row) {
    act.template operator()<tile>(row);
    if constexpr (width == Width::kWhole) act.template operator()<tile + 1>(row + kTileRowBytes);
  };
  auto* first = static_cast<char*>(c);
  of_rows.template operator()<0>(first);
  if constexpr (hold == Hold::kOne) return;
  of_rows.template operator()<2>(first + starts.second * stride);
  if constexpr (hold == Hold::kTwo) return;
  of_rows.template operator()<4>(first + starts.third * stride);
}

template <Width width = Width::kWhole, Hold hold>
void zero_sums(void* to, int64_t stride, const Starts<hold>& starts) {
  each_sum<width>(to, stride, starts, []<int tile>(const char*) { zero_tile<tile>(); });
}
template <Width width = Width::kWhole, Hold hold>
void load_sums(void* from, int64_t stride, const Starts<hold>& starts) {
  each_sum<width>(from, stride, starts, [stride]<int tile>(const char* at) { load_tile<tile>(at, stride); });
}
template <Width width = Width::kWhole, Hold hold>
void store_sums(void* to, int64_t stride, const Starts<hold>& starts) {
  each_sum<width>(to, stride, starts, [stride]<int tile>(char* at) { store_tile<tile>(at, stride); });
}

// Product: the instruction, as a template over its three tiles. `rows_pass`: see Tile. Three tiles of rows are
// read twice, and never pass.
template <typename Product, Width width = Width::kWhole, Hold hold>
inline void multiply_block(const void* rows, int64_t stride, const void* columns, const Starts<hold>& starts, bool rows_pass = false) {
  const auto* a = static_cast<const char*>(rows);
  const auto* panel = static_cast<const char*>(columns);
  if constexpr (hold == Hold::kThree) {
    load_tile<7>(panel, kStepBytes);
    load_tile<6>(a, stride);
    Product::template multiply<0, 6, 7>();
    load_tile<6>(a + starts.second * stride, stride);
    Product::template multiply<2, 6, 7>();
    load_tile<6>(a + starts.third * stride, stride);
    Product::template multiply<4, 6, 7>();
    if constexpr (width == Width::kHalf) return;
    load_tile<7>(panel + kTileRowBytes, kStepBytes);
    Product::template multiply<5, 6, 7>();
    load_tile<6>(a + starts.second * stride, stride);
    Product::template multiply<3, 6, 7>();
    load_tile<6>(a, stride);
    Product::template multiply<1, 6, 7>();
    return;
  }
  const auto load_rows = [=]<int to>(const char* from) __attribute__((always_inline)) {
    if (rows_pass)
      load_passing_tile<to>(from, stride);
    else
      load_tile<to>(from, stride);
  };
  load_tile<6>(panel, kStepBytes);
  load_rows.template operator()<4>(a);
  Product::template multiply<0, 4, 6>();
  if constexpr (width == Width::kWhole) {
    load_tile<7>(panel + kTileRowBytes, kStepBytes);
    Product::template multiply<1, 4, 7>();
  }
  if constexpr (hold == Hold::kTwo) {
    load_rows.template operator()<5>(a + starts.second * stride);
    Product::template multiply<2, 5, 6>();
    if constexpr (width == Width::kWhole) Product::template multiply<3, 5, 7>();
  }
}

// Runs of<hold>::run(tile, more...) for the hold that a tile's rows need.
template <template <Hold> typename Of, typename Given, typename... More>
void by_hold(const Given& tile, const More&... more) {
  switch (hold_of(tile.m)) {
    case Hold::kOne: return Of<Hold::kOne>::run(tile, more...);
    case Hold::kTwo: return Of<Hold::kTwo>::run(tile, more...);
    case Hold::kThree: return Of<Hold::kThree>::run(tile, more...);
  }
}

}  // namespace
}  // namespace sgl_batch
#endif
