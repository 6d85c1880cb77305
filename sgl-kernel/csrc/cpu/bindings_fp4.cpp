// Owns the operators in fp4 as torch sees them: shapes and number types are checked here, nothing is computed.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "fp4.h"
#include "grouped_panels.h"

namespace sgl_batch {
namespace {

// [B, N, K] of bf16 beside the bytes of its fp4.
void check_fp4(const at::Tensor& plain, const at::Tensor& packed) {
  check(plain, 3, "weight");
  check(packed, 3, "packed");
  const int64_t n = plain.size(1), k = plain.size(2);
  TORCH_CHECK(plain.scalar_type() == at::kBFloat16 && fp4_takes(n, k), "weight is ", plain.scalar_type(), plain.sizes(),
              "; fp4 takes bfloat16 of multiples of ", kPanel, " outputs and ", kFp4BlockK, " inputs");
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.size(0) == plain.size(0) && packed.size(1) == n &&
                  packed.size(2) == packed_bytes(DType::kFp4, k),
              "packed is ", packed.scalar_type(), packed.sizes(), "; use uint8 [", plain.size(0), ", ", n, ", ",
              packed_bytes(DType::kFp4, k), "]");
}

bool pack_fp4(const at::Tensor& weight, at::Tensor packed) {
  check_fp4(weight, packed);
  return pack_groups(weight, packed, DType::kFp4, [k = weight.size(2)](const uint16_t* plain, void* panel) {
    return pack_fp4_panel(plain, k, panel);
  });
}

at::Tensor unpack_fp4(const at::Tensor& packed) {
  check(packed, 3, "packed");
  const int64_t k = inputs_of(packed, packed.size(2));
  auto plain = at::empty({packed.size(0), packed.size(1), k}, packed.options().dtype(at::kBFloat16));
  check_fp4(plain, packed);
  each_grouped_panel(plain, packed, DType::kFp4,
                      [k](uint16_t* numbers, const void* panel) { unpack_fp4_panel(panel, k, numbers); });
  return plain;
}

void widen_mxfp4(const at::Tensor& blocks, const at::Tensor& scales, at::Tensor out) {
  check(blocks, 2, "blocks");
  check(scales, 2, "scales");
  check(out, 2, "out");
  const int64_t rows = out.size(0), k = out.size(1);
  TORCH_CHECK(out.scalar_type() == at::kBFloat16 && k % kFp4BlockK == 0, "out is ", out.scalar_type(), out.sizes(),
              "; use bfloat16 of a multiple of ", kFp4BlockK, " inputs");
  TORCH_CHECK(blocks.scalar_type() == at::kByte && scales.scalar_type() == at::kByte && blocks.size(0) == rows &&
                  scales.size(0) == rows && blocks.size(1) == k / 2 && scales.size(1) == k / kFp4BlockK,
              "blocks are ", blocks.scalar_type(), blocks.sizes(), " and scales ", scales.scalar_type(), scales.sizes(),
              "; use uint8 [", rows, ", ", k / 2, "] and [", rows, ", ", k / kFp4BlockK, "]");
  const auto *from = blocks.data_ptr<uint8_t>(), *powers = scales.data_ptr<uint8_t>();
  auto* to = static_cast<uint16_t*>(out.data_ptr());
  run_tasks(divide_up(rows, kPanel), [&](int64_t task, int) {
    for (int64_t row = task * kPanel; row < std::min((task + 1) * kPanel, rows); ++row)
      widen_mxfp4_row(from + row * k / 2, powers + row * k / kFp4BlockK, k, to + row * k);
  });
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("pack_fp4_(Tensor weight, Tensor(a!) packed) -> bool");
  library.def("unpack_fp4(Tensor packed) -> Tensor");
  library.def("widen_mxfp4_(Tensor blocks, Tensor scales, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_fp4_", sgl_batch::pack_fp4);
  library.impl("unpack_fp4", sgl_batch::unpack_fp4);
  library.impl("widen_mxfp4_", sgl_batch::widen_mxfp4);
}
