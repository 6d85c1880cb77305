// Owns the operators of latent attention as torch sees them: shapes and number types are checked here.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention_mla.h"
#include "linear.h"
#include "piece_record.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

at::Tensor latent_attention(const at::Tensor& q, const at::Tensor& pages, const at::Tensor& starts, const at::Tensor& lengths,
                            const at::Tensor& table_starts, const at::Tensor& tables, int64_t value_dim, double scaling) {
  check(pages, 3, "pages");
  const int64_t page = pages.size(1), dim = pages.size(2);
  TORCH_CHECK(q.dim() == 2 && q.stride(1) == 1 && q.size(1) % dim == 0, "q is ", q.sizes(), " with strides ",
              q.strides(), " for rows of ", dim);
  TORCH_CHECK(pages.scalar_type() == q.scalar_type(), "q is ", q.scalar_type(), " and pages are ", pages.scalar_type());
  TORCH_CHECK(value_dim > 0 && value_dim <= dim, "values are ", value_dim, " of a row's ", dim, " numbers");
  const DType dtype = dtype_of(q, "q");
  TORCH_CHECK(dtype == DType::kF32 || (dim % 2 == 0 && q.stride(0) % 2 == 0), "bfloat16 rows of ", dim,
              " numbers, queries ", q.stride(0), " apart: both must be even");
  check_pieces(starts, lengths, table_starts, tables, q.size(0), page, pages.size(0));
  const int64_t heads = q.size(1) / dim;
  auto out = at::empty({q.size(0), heads * value_dim}, q.options());
  const MlaCall call{lengths.size(0), heads, dim, value_dim, page, q.data_ptr(), q.stride(0), pages.data_ptr(), dtype,
                     starts.data_ptr<int64_t>(), lengths.data_ptr<int64_t>(), table_starts.data_ptr<int64_t>(),
                     tables.data_ptr<int64_t>(), static_cast<float>(scaling), out.data_ptr()};
  run_and_record("latent_attention", call, run_mla, {starts, lengths, table_starts, tables, page, pages.size(0)}, {q, pages, out});
  return out;
}

void linear_by_head(const at::Tensor& x, const at::Tensor& weight, at::Tensor out) {
  check(weight, 3, "weight");
  const int64_t heads = weight.size(0), n = weight.size(1), k = weight.size(2);
  TORCH_CHECK(x.dim() == 3 && x.size(1) == heads && x.size(2) == k && x.stride(2) == 1, "x is ", x.sizes(), " with strides ",
              x.strides(), " for weights ", weight.sizes());
  TORCH_CHECK(out.dim() == 3 && out.size(0) == x.size(0) && out.size(1) == heads && out.size(2) == n && out.stride(2) == 1,
              "out is ", out.sizes(), " with strides ", out.strides(), " for ", x.size(0), " rows and weights ",
              weight.sizes());
  TORCH_CHECK(out.scalar_type() == x.scalar_type(), "out is ", out.scalar_type(), " and x ", x.scalar_type());
  const DType dtype = dtype_of(x, "x");
  TORCH_CHECK(dtype == DType::kF32 || (x.stride(0) % 2 == 0 && x.stride(1) % 2 == 0), "rows of bfloat16 x are ", x.stride(0),
              " apart and heads ", x.stride(1), ": both must be even");
  const PackedWeight packed{weight.data_ptr(), dtype_of(weight, "weight"), nullptr, n, k};
  const LinearCall call{x.size(0), heads, x.data_ptr(), x.stride(0), x.stride(1), dtype, packed, nullptr, out.data_ptr(),
                        out.stride(0), out.stride(1)};
  run_and_record("linear_by_head", call, &LinearCall::rows, run_linear, {x, weight, out});
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def(
      "latent_attention(Tensor q, Tensor pages, Tensor starts, Tensor lengths, Tensor table_starts, Tensor tables, int "
      "value_dim, float scaling) -> Tensor");
  library.def("linear_by_head(Tensor x, Tensor weight, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("latent_attention", sgl_batch::latent_attention);
  library.impl("linear_by_head", sgl_batch::linear_by_head);
}
