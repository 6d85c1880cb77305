// Owns how rows become int8 and how sums of int8 become numbers again. Element by element, one rounding each: the same bits
// on every instruction set.
#pragma once

#include <cstdint>

#include "gemm_int8.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {

// Rows of k numbers of int8, each with its scale and shift (see Scaling).
struct Int8Rows {
  int8_t* data;
  RowLayout layout;
  int64_t k;
  float* scales;
  int32_t* shifts;

  // Where a row's numbers from `first` on lie, which is a multiple of kRowBytes.
  int8_t* at(int64_t index, int64_t first = 0) const { return data + layout.at(index, first); }
  // To rows that may lie otherwise; these lie one after the other.
  void copy(int64_t from, const Int8Rows& to, int64_t index) const;
};

// Room for rows of k numbers in a workspace, one after the other or by blocks of k.
class Int8RowsRoom {
 public:
  Int8RowsRoom() = default;
  Int8RowsRoom(Carver& carver, int64_t rows, int64_t k, bool by_blocks)
      : layout_(by_blocks ? RowLayout::blocks(rows) : RowLayout::plain(row_stride(round_up(k, kRowBytes)))),
        k_(k),
        data_at_(carver.take(layout_.room(rows, k))),
        scales_at_(carver.take(sizeof(float) * static_cast<size_t>(rows))),
        shifts_at_(carver.take(sizeof(int32_t) * static_cast<size_t>(rows))) {}
  Int8Rows in(char* base) const {
    return {reinterpret_cast<int8_t*>(base + data_at_), layout_, k_, reinterpret_cast<float*>(base + scales_at_),
            reinterpret_cast<int32_t*>(base + shifts_at_)};
  }

 private:
  RowLayout layout_{};
  int64_t k_ = 0;
  size_t data_at_ = 0, scales_at_ = 0, shifts_at_ = 0;
};

// Rounds a row to [-127, 127], to nearest, ties to even: its scale is its largest number over 127, or 1 where
// that is nothing. A row with a number that is not finite has a scale that is no number, and so has what it is multiplied to.
void round_row(const float* row, const Int8Rows& to, int64_t index);

// The same for rows of bf16 or f32 that begin `stride` bytes apart, shared among threads.
void round_rows(const void* rows, DType dtype, int64_t stride, int64_t count, const Int8Rows& to);

// Rows of `width` columns of sums to numbers. Rows of sums have kPanel numbers, those of `to` begin `stride` apart.
void scale_sums(const int32_t* sums, int rows, int64_t width, const Scaling& by, float* to, int64_t stride);

}  // namespace sgl_batch
