// Owns the row-wise operators around attention: RMS norm with residual, and rotary embedding. All sums in f32, in an
// order that depends on the row's length alone.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// h = x + residual (where given, and written back to residual_out); out = h / sqrt(mean(h^2) + eps) * weight. Outputs may lie
// where inputs lie.
struct RmsNormCall {
  int64_t rows, width;
  const void* x;
  int64_t x_stride;      // elements from row to row
  const void* residual;  // [rows, width] or null
  void* residual_out;    // [rows, width] or null
  const void* weight;    // [width]
  DType weight_dtype;
  float eps;
  void* out;  // [rows, width]
  DType dtype;
};

void run_rms_norm(const RmsNormCall& call);

// Rotates the first `rotary_dim` numbers of every head of `x` [rows, heads * head_dim] in place by its position's
// cosines and sines: cos_sin [positions, rotary_dim], cosines first. `neox`: pairs lie half a rotary_dim apart,
// otherwise side by side.
struct RotaryCall {
  int64_t rows, heads, head_dim, rotary_dim;
  const int64_t* positions;
  const void* cos_sin;
  DType cos_sin_dtype;
  bool neox;
  void* x;
  int64_t x_stride;
  DType dtype;
};

void run_rotary(const RotaryCall& call);

// Both for the query and key heads of rows [q heads | k heads | whatever follows], in place: each head's norm by itself,
// rounded to `dtype`, then its rotation. Equals run_rms_norm and run_rotary one after the other.
struct QkNormRopeCall {
  RotaryCall heads;  // of queries and keys together
  int64_t q_heads;
  const void* q_weight;  // [head_dim]
  const void* k_weight;  // [head_dim]
  DType weight_dtype;
  float eps;
};

void run_qk_norm_rope(const QkNormRopeCall& call);

}  // namespace sgl_batch
