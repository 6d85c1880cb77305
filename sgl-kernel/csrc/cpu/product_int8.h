// Owns the product of a tile of int8 rows with one packed panel, as numbers: what experts_int8 and linear_int8 share.
#pragma once

#include "packing_int8.h"
#include "rows.h"
#include "rows_int8.h"

namespace sgl_batch {

// A panel of a weight, ready for tiles. `bias` of all its columns, or null.
class Int8Panel {
 public:
  // `spare`: of the weight's spare_bytes(), in use as long as the panel.
  Int8Panel(const Int8Kernel& kernel, const PackedInt8& weight, int64_t index, const float* bias, uint8_t* spare)
      : kernel_(kernel),
        ready_(weight.ready(index, spare)),
        steps_(quad_steps(weight.k)),
        width_(weight.width(index)),
        scales_(weight.scales + index * kPanel),
        bias_(bias) {}

  // Rows [row, row + m) times the panel: f32 rows that begin `stride` apart. All kPanel columns are written where the
  // panel has as many.
  void multiply(const Int8Rows& rows, int64_t row, int m, const Ahead& ahead, float* to, int64_t stride) const {
    const Int8Tile tile{rows.row(row), rows.stride, ready_, steps_, m, rows.starts + row, nullptr, ahead};
    if (kernel_.run_scaled != nullptr && width_ == kPanel)
      kernel_.run_scaled({tile, rows.scales + row, scales_, to, stride});
    else
      scale_afterwards(tile, rows.scales + row, to, stride);
    if (bias_ != nullptr)
      for (int i = 0; i < m; ++i) add_row(to + i * stride, bias_, width_);
  }

 private:
  void scale_afterwards(Int8Tile tile, const float* row_scales, float* to, int64_t stride) const {
    alignas(64) int32_t sums[kMaxRows * kPanel];
    tile.c = sums;
    kernel_.run(tile);
    scale_sums(sums, tile.m, width_, {row_scales, scales_}, to, stride);
  }

  const Int8Kernel& kernel_;
  const uint8_t* const ready_;
  const int64_t steps_, width_;
  const float* const scales_;
  const float* const bias_;
};

}  // namespace sgl_batch
