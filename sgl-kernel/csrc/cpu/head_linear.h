// Owns the product of the rows of each head with a packed weight of its own.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// out[row, head, 0:n] = x[row, head, 0:k] * w[head]^T; w is packed [heads][n, k]. Strides are in elements; numbers of a
// head lie one after the other. out has x's number type.
struct HeadLinearCall {
  int64_t rows, heads, n, k;
  const void* x;
  int64_t x_row, x_head;
  DType dtype;
  const void* w;
  DType w_dtype;
  void* out;
  int64_t out_row, out_head;
};

void run_head_linear(const HeadLinearCall& call);

}  // namespace sgl_batch
