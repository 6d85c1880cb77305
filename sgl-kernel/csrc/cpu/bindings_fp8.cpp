// Owns the operators in fp8 as torch sees them: shapes and number types are checked here, nothing is computed.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "fp8.h"
#include "grouped_panels.h"

namespace sgl_batch {
namespace {

constexpr ScaledForm kFp8{.name = "fp8",
                          .block_k = kFp8BlockK,
                          .dtype_of = fp8_dtype_of,
                          .group_of = fp8_group,
                          .pack_panel = pack_fp8_panel,
                          .unpack_panel = unpack_fp8_panel};

bool pack_fp8(const at::Tensor& weight, at::Tensor packed) { return kFp8.pack(weight, packed); }
at::Tensor unpack_fp8(const at::Tensor& packed, int64_t k) { return kFp8.unpack(packed, k); }

void widen_fp8(const at::Tensor& numbers, const at::Tensor& scales, int64_t block_rows, int64_t block_columns, at::Tensor out) {
  check(numbers, 2, "numbers");
  check(scales, 2, "scales");
  check(out, 2, "out");
  const int64_t rows = out.size(0), k = out.size(1);
  TORCH_CHECK(block_rows > 0 && block_columns > 0, "blocks of ", block_rows, " x ", block_columns, "; use positive numbers");
  const int64_t across = divide_up(k, block_columns);
  TORCH_CHECK(numbers.scalar_type() == at::kFloat8_e4m3fn && out.scalar_type() == at::kBFloat16 && numbers.sizes() == out.sizes(),
              "numbers are ", numbers.scalar_type(), numbers.sizes(), " and out is ", out.scalar_type(), out.sizes(),
              "; use float8_e4m3fn and bfloat16 of one shape");
  TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.size(0) == divide_up(rows, block_rows) && scales.size(1) == across,
              "scales are ", scales.scalar_type(), scales.sizes(), "; use float32 [", divide_up(rows, block_rows), ", ", across, "]");
  const auto* from = static_cast<const uint8_t*>(numbers.data_ptr());
  const auto* own = scales.data_ptr<float>();
  auto* to = static_cast<uint16_t*>(out.data_ptr());
  run_tasks(divide_up(rows, kPanel), [&](int64_t task, int) {
    for (int64_t row = task * kPanel; row < std::min((task + 1) * kPanel, rows); ++row)
      widen_fp8_row(from + row * k, own + row / block_rows * across, block_columns, k, to + row * k);
  });
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("pack_fp8_(Tensor weight, Tensor(a!) packed) -> bool");
  library.def("unpack_fp8(Tensor packed, int inputs) -> Tensor");
  library.def("widen_fp8_(Tensor numbers, Tensor scales, int block_rows, int block_columns, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_fp8_", sgl_batch::pack_fp8);
  library.impl("unpack_fp8", sgl_batch::unpack_fp8);
  library.impl("widen_fp8_", sgl_batch::widen_fp8);
}
