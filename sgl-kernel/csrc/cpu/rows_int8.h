// Owns how rows become int8 and how sums of int8 become numbers again. Element by element, one rounding each: the same bits
// on every instruction set.
#pragma once

#include <cstdint>

#include "gemm_int8.h"
#include "workspace.h"

namespace sgl_batch {

// Rows of int8, `stride` bytes apart, each with its scale and what its sums start with (see Int8Tile).
struct Int8Rows {
  int8_t* data;
  int64_t stride;
  float* scales;
  int32_t* starts;

  int8_t* row(int64_t index) const { return data + index * stride; }
  void copy(int64_t from, const Int8Rows& to, int64_t index) const;
};

// Room for rows of k numbers in a workspace.
class Int8RowsRoom {
 public:
  Int8RowsRoom() = default;
  Int8RowsRoom(Carver& carver, int64_t rows, int64_t k)
      : stride_(row_stride((k + kRowBytes - 1) / kRowBytes * kRowBytes)),
        data_at_(carver.take(static_cast<size_t>(rows * stride_))),
        scales_at_(carver.take(sizeof(float) * static_cast<size_t>(rows))),
        starts_at_(carver.take(sizeof(int32_t) * static_cast<size_t>(rows))) {}
  Int8Rows in(char* base) const {
    return {reinterpret_cast<int8_t*>(base + data_at_), stride_, reinterpret_cast<float*>(base + scales_at_),
            reinterpret_cast<int32_t*>(base + starts_at_)};
  }

 private:
  int64_t stride_ = 0;
  size_t data_at_ = 0, scales_at_ = 0, starts_at_ = 0;
};

// Rounds a row of k numbers to [-127, 127], to nearest, ties to even: its scale is its largest number over 127, or 1 where
// that is nothing. A row with a number that is not finite has a scale that is no number, and so has what it is multiplied to.
void round_row(const float* row, int64_t k, const Int8Rows& to, int64_t index);

// The same for rows of bf16 or f32 that begin `stride` bytes apart, shared among threads.
void round_rows(const void* rows, DType dtype, int64_t stride, int64_t count, int64_t k, const Int8Rows& to);

// to[row][column] = (sum * row's scale) * column's scale, of `width` columns.
// Rows of sums have kPanel numbers, those of `to` begin `stride` apart. All kPanel columns are written where width is kPanel.
struct Scaling {
  const float* rows;
  const float* columns;
};
void scale_sums(const int32_t* sums, int rows, int64_t width, const Scaling& by, float* to, int64_t stride);

}  // namespace sgl_batch
