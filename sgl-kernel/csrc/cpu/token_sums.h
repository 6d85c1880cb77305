// Owns the sums of tokens' weighted products over experts, added up as the products come.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm.h"
#include "routing.h"

namespace sgl_batch {

// Some columns (a multiple of kPanel) of the sums of tokens [begin, end). A token's choices are added up in the order of a
// binary tree over expert ids: a sum over one half of the ids stays open until that over the other half is there. Products
// and sums are rounded one by one.
class TokenSums {
 public:
  // `room`: of room_bytes() for as many tokens and columns; its content does not matter.
  TokenSums(const Routing& routing, int64_t begin, int64_t end, int64_t columns, void* room)
      : routing_(routing), begin_(begin), end_(end), columns_(columns), open_(static_cast<float*>(room)) {}

  static size_t room_bytes(const Routing& routing, int64_t tokens, int64_t columns) {
    return sizeof(float) * static_cast<size_t>(routing.most_open * tokens * columns);
  }

  // Adds the products of routed rows [first, first + count): rows of `columns` floats, one after the other. Experts come in
  // ascending order, each with all its rows in theirs.
  void add(int64_t first, int count, const float* products);

  // Writes `width` columns of all sums; a token without choices has zeros. Rows of `to` are `stride` bytes apart.
  void write(void* to, int64_t stride, DType dtype, int64_t width) const;

 private:
  const Routing& routing_;
  const int64_t begin_, end_, columns_;
  float* const open_;  // [most_open][tokens][columns]
};

}  // namespace sgl_batch
