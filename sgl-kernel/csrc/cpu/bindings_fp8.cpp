// Owns the operators in fp8 as torch sees them: shapes and number types are checked here, nothing is computed.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "grouped_panels.h"
#include "fp8.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

// [B, N, K] of bf16 beside the bytes of its fp8; returns their number type.
DType check_fp8(const at::Tensor& plain, const at::Tensor& packed) {
  check(plain, 3, "weight");
  check(packed, 3, "packed");
  const int64_t n = plain.size(1), k = plain.size(2);
  TORCH_CHECK(plain.scalar_type() == at::kBFloat16 && n > 0 && k > 0 && n % kPanel == 0 && k % kFp8BlockK == 0, "weight is ",
              plain.scalar_type(), plain.sizes(), "; fp8 takes bfloat16 of multiples of ", kPanel, " outputs and ", kFp8BlockK,
              " inputs");
  const DType dtype = fp8_dtype_of(packed, k, "packed");
  TORCH_CHECK(packed.size(0) == plain.size(0) && packed.size(1) == n, "packed is ", packed.sizes(), " for a weight ", plain.sizes());
  return dtype;
}

bool pack_fp8(const at::Tensor& weight, at::Tensor packed) {
  const DType dtype = check_fp8(weight, packed);
  return pack_groups(weight, packed, dtype, [k = weight.size(2), group = fp8_group(dtype)](const uint16_t* plain, void* panel) {
    return pack_fp8_panel(plain, k, group, panel);
  });
}

at::Tensor unpack_fp8(const at::Tensor& packed, int64_t k) {
  check(packed, 3, "packed");
  auto plain = at::empty({packed.size(0), packed.size(1), k}, packed.options().dtype(at::kBFloat16));
  const DType dtype = check_fp8(plain, packed);
  each_grouped_panel(plain, packed, dtype, [k, group = fp8_group(dtype)](uint16_t* numbers, const void* panel) {
    unpack_fp8_panel(panel, k, group, numbers);
  });
  return plain;
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("pack_fp8_(Tensor weight, Tensor(a!) packed) -> bool");
  library.def("unpack_fp8(Tensor packed, int inputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_fp8_", sgl_batch::pack_fp8);
  library.impl("unpack_fp8", sgl_batch::unpack_fp8);
}
