// Owns what every operator asks of its tensors, with messages that say what was given.
#pragma once

#include <ATen/ATen.h>

#include "gemm.h"

namespace sgl_batch {

inline DType dtype_of(const at::Tensor& tensor, const char* name) {
  if (tensor.scalar_type() == at::kBFloat16) return DType::kBf16;
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name, " is ", tensor.scalar_type(), "; use bfloat16 or float32");
  return DType::kF32;
}

inline void check(const at::Tensor& tensor, int64_t dim, const char* name) {
  TORCH_CHECK(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, not ", dim);
  TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
}

inline void check_index(const at::Tensor& tensor, const char* name) {
  check(tensor, 1, name);
  TORCH_CHECK(tensor.scalar_type() == at::kLong, name, " is ", tensor.scalar_type(), "; use int64");
}

}  // namespace sgl_batch
