// Owns the product of rows, rounded to int8, with packed int8 weights.
#pragma once

#include <cstdint>

#include "packing_int8.h"

namespace sgl_batch {

// out[rows, n] = x[rows, k] * w^T (+ bias), rows one after the other. bias is null or f32 [n]. out has x's number type.
struct LinearInt8Call {
  int64_t rows;
  const void* x;
  DType x_dtype;
  PackedInt8 w;
  const float* bias;
  void* out;
};

void run_linear_int8(const LinearInt8Call& call);

}  // namespace sgl_batch
