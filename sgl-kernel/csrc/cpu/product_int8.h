// Owns the product of a tile of int8 rows with one packed panel, as numbers: what experts_int8 and linear_int8 share.
#pragma once

#include "packing_int8.h"
#include "rows.h"
#include "rows_int8.h"

namespace sgl_batch {

// Where cores bring lines by themselves, so few tiles leave no time for those that are asked for to be in the first cache when they
// are needed.
constexpr int64_t kTilesWithNearLines = 3;

// The rows of one of several tiles, and what it brings closer: its share of the panel that comes next, and `count` of the rows
// that do, where these lie by blocks of k.
struct Int8TileOf {
  int64_t row() const { return tiles.at(tile); }
  int m() const { return tiles.size(tile); }

  const Tiles& tiles;
  int64_t tile;
  const uint8_t* next_panel;
  const int8_t* next_rows = nullptr;
  int64_t count = 0;
  bool rows_pass = false;  // see Tile
};

// A panel of a weight, ready for tiles. `bias` of all its columns, or null.
class Int8Panel {
 public:
  // `spare`: of the weight's spare_bytes(), in use as long as the panel.
  Int8Panel(const Int8Kernel& kernel, const PackedInt8& weight, int64_t index, const float* bias, uint8_t* spare)
      : kernel_(kernel),
        ready_(weight.ready(index, spare)),
        width_(weight.width(index)),
        scales_(weight.scales + index * kPanel),
        bias_(bias) {}

  // A tile's rows times the panel: f32 rows that begin `stride` apart. All kPanel columns are written where the panel has as
  // many.
  void multiply(const Int8Rows& rows, const Int8TileOf& of, float* to, int64_t stride) const {
    if (kernel_.run_scaled != nullptr && width_ == kPanel) {
      kernel_.run_scaled({part(rows, of, 0, rows.k, nullptr), scaling(rows, of), to, stride});
      add_bias(of, to, stride);
      return;
    }
    alignas(64) int32_t sums[kMaxRows * kPanel];
    kernel_.run(part(rows, of, 0, rows.k, sums));
    finish(rows, of, sums, to, stride);
  }

  // The same over a part of k, [first, first + count): into rows of kPanel sums, or added to them if it is not the first part.
  void add_up(const Int8Rows& rows, const Int8TileOf& of, int64_t first, int64_t count, int32_t* sums) const {
    kernel_.run(part(rows, of, first, count, sums));
  }

  // What multiply gives, of the sums of all parts.
  void finish(const Int8Rows& rows, const Int8TileOf& of, const int32_t* sums, float* to, int64_t stride) const {
    scale_sums(sums, of.m(), width_, scaling(rows, of), to, stride);
    add_bias(of, to, stride);
  }

 private:
  // Made in its place: a copy of numbers just written would wait until all is written that the tile before it wrote.
  Int8Tile part(const Int8Rows& rows, const Int8TileOf& of, int64_t first, int64_t count, int32_t* sums) const {
    Int8Tile tile{.a = rows.at(of.row(), first), .a_stride = rows.layout.row, .panel = ready_ + first * kPanel,
                  .steps = quad_steps(count), .m = of.m(), .c = sums,
                  .ahead = of.tiles.ahead(of.tile, of.next_panel, kPanel * rows.k, quad_steps(rows.k), quad_steps(first), kFewInt8Rows),
                  .add = first > 0, .a_block = rows.layout.block,
                  .ahead_is_near = of.tiles.count >= kTilesWithNearLines || !core_brings_lines_between(),
                  .rows_pass = of.rows_pass};
    if (of.next_rows != nullptr) bring_blocks(tile.ahead, of.next_rows + rows.layout.at(0, first), of.count, rows.layout);
    return tile;
  }
  Scaling scaling(const Int8Rows& rows, const Int8TileOf& of) const {
    return {rows.shifts + of.row(), rows.scales + of.row(), scales_};
  }
  void add_bias(const Int8TileOf& of, float* to, int64_t stride) const {
    if (bias_ == nullptr) return;
    for (int i = 0; i < of.m(); ++i) add_row(to + i * stride, bias_, width_);
  }

  const Int8Kernel& kernel_;
  const uint8_t* const ready_;
  const int64_t width_;
  const float* const scales_;
  const float* const bias_;
};

}  // namespace sgl_batch
