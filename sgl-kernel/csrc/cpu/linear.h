// Owns the product of rows with packed weights: of whole rows with one weight, or of the parts of rows that belong to
// heads, each with a weight of its own.
#pragma once

#include <cstdint>

#include "packing.h"

namespace sgl_batch {

// out[row, head, 0:n] = x[row, head, 0:k] * w[head]^T (+ bias); strides are in elements, numbers of a head lie one after
// the other. w is packed, [n, k] of the first head, with those of the others behind it. bias is null or f32 [n], for one
// head alone. out has x's number type.
struct LinearCall {
  int64_t rows, heads;
  const void* x;
  int64_t x_row, x_head;
  DType x_dtype;
  PackedWeight w;
  const float* bias;
  void* out;
  int64_t out_row, out_head;
};

void run_linear(const LinearCall& call);

}  // namespace sgl_batch
