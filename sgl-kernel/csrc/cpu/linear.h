// Owns the product of rows with one packed weight.
#pragma once

#include <cstdint>

#include "packing.h"

namespace sgl_batch {

// out[rows, n] = x[rows, k] * w^T (+ bias); w is [n, k]; bias is null or f32 [n]; out has x's number type.
struct LinearCall {
  int64_t rows;
  const void* x;
  DType x_dtype;
  PackedWeight w;
  const float* bias;
  void* out;
};

void run_linear(const LinearCall& call);

}  // namespace sgl_batch
