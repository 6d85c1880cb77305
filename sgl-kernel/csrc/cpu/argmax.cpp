// Owns where the largest number of each row is: the greedy choice of a token.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "clones.h"
#include "number_keys.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kBlock = 1024;  // numbers, of which only one block is searched

[[gnu::always_inline]] inline uint32_t bits_of(uint32_t f32) { return f32; }
[[gnu::always_inline]] inline uint32_t bits_of(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }

template <typename Number>
[[gnu::always_inline]] inline int64_t first_largest(const Number* row, int64_t count) {
  int32_t largest = key_of(bits_of(row[0]));
  int64_t block = 0;  // the first one that has it
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int32_t own = key_of(bits_of(row[begin]));
    const int64_t end = std::min(count, begin + kBlock);
#pragma omp simd reduction(max : own)
    for (int64_t i = begin; i < end; ++i) {
      const int32_t key = key_of(bits_of(row[i]));
      own = key > own ? key : own;
    }
    if (own > largest) {
      largest = own;
      block = begin;
    }
  }
  while (key_of(bits_of(row[block])) != largest) ++block;
  return block;
}

SGL_BATCH_CLONES int64_t first_largest_f32(const uint32_t* row, int64_t count) { return first_largest(row, count); }
SGL_BATCH_CLONES int64_t first_largest_bf16(const uint16_t* row, int64_t count) { return first_largest(row, count); }

at::Tensor argmax(const at::Tensor& rows) {
  TORCH_CHECK(rows.dim() == 2 && rows.size(1) > 0 && rows.stride(1) == 1, "rows are ", rows.sizes(), " with strides ",
              rows.strides(), "; they are contiguous and have at least one number");
  const DType dtype = dtype_of(rows, "rows");
  auto out = at::empty({rows.size(0)}, rows.options().dtype(at::kLong));
  auto* to = out.data_ptr<int64_t>();
  const auto* from = static_cast<const char*>(rows.data_ptr());
  const int64_t count = rows.size(1), stride = rows.stride(0) * static_cast<int64_t>(size_of(dtype));
  run_tasks(rows.size(0), [&](int64_t row, int) {
    const void* numbers = from + row * stride;
    to[row] = dtype == DType::kF32 ? first_largest_f32(static_cast<const uint32_t*>(numbers), count)
                                   : first_largest_bf16(static_cast<const uint16_t*>(numbers), count);
  });
  return out;
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) { library.def("argmax(Tensor rows) -> Tensor"); }

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) { library.impl("argmax", sgl_batch::argmax); }
