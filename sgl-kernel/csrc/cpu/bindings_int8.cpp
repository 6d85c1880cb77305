// Owns the operators in int8 as torch sees them: shapes and number types are checked here, nothing is computed.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "experts_int8.h"
#include "linear_int8.h"
#include "packing_int8.h"
#include "record.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

void check_int8(const at::Tensor& weight, int64_t dim, const char* name) {
  check(weight, dim, name);
  TORCH_CHECK(weight.scalar_type() == at::kChar, name, " is ", weight.scalar_type(), "; use int8");
  TORCH_CHECK(weight.size(dim - 1) <= kMostInputs, name, " has ", weight.size(dim - 1), " inputs; at most ", kMostInputs,
              " can be added up in 32 bits");
}

template <typename Each>
void each_matrix(at::Tensor& weight, const Each& each) {
  check_int8(weight, 3, "weight");
  const int64_t n = weight.size(1), k = weight.size(2);
  const auto scratch = at::empty({num_threads(), kPanel * k}, weight.options());
  run_tasks(weight.size(0), [&](int64_t index, int thread) {
    each(weight.data_ptr<int8_t>() + index * n * k, n, k, scratch.data_ptr<int8_t>() + thread * kPanel * k);
  });
}

void pack(at::Tensor weight) { each_matrix(weight, pack_quads); }
void unpack(at::Tensor weight) { each_matrix(weight, unpack_quads); }

std::tuple<at::Tensor, at::Tensor> experts(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2,
                                           const at::Tensor& topk_weights, const at::Tensor& topk_ids, bool f32_output,
                                           const at::Tensor& w13_scales, const at::Tensor& w2_scales,
                                           const std::optional<at::Tensor>& w13_bias,
                                           const std::optional<at::Tensor>& w2_bias, std::optional<double> alpha,
                                           std::optional<double> limit) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "x is ", x.sizes(), " with strides ", x.strides(), "; rows are contiguous");
  check_int8(w13, 3, "w13");
  check_int8(w2, 3, "w2");
  const int64_t tokens = x.size(0), hidden = x.size(1), experts = w13.size(0), inter = w2.size(2);
  TORCH_CHECK(w13.size(1) == 2 * inter && w13.size(2) == hidden, "w13 is ", w13.sizes(), ", not [", experts, ", ", 2 * inter,
              ", ", hidden, "]");
  TORCH_CHECK(w2.size(0) == experts && w2.size(1) == hidden, "w2 is ", w2.sizes(), ", not [", experts, ", ", hidden, ", ",
              inter, "]");
  check_choices(topk_weights, topk_ids, tokens);
  TORCH_CHECK(alpha.has_value() == limit.has_value(), "alpha and limit are given together");
  auto out = experts_out(tokens, hidden, f32_output ? x.options().dtype(at::kFloat) : x.options());
  auto rows_per_expert = at::zeros({experts}, x.options().dtype(at::kLong));
  ExpertsCall call{};
  call.tokens = tokens, call.top_k = topk_ids.size(1), call.hidden = hidden, call.inter = inter, call.experts = experts;
  call.x = x.data_ptr(), call.x_stride = x.stride(0), call.x_dtype = dtype_of(x, "x");
  call.w13 = w13.data_ptr(), call.w2 = w2.data_ptr(), call.w_dtype = DType::kI8;
  call.w13_scales = scales_of(w13, w13_scales, experts * 2 * inter, "w13");
  call.w2_scales = scales_of(w2, w2_scales, experts * hidden, "w2");
  call.topk_weights = topk_weights.data_ptr<float>(), call.topk_ids = topk_ids.data_ptr<int32_t>();
  call.out = out.data_ptr(), call.out_dtype = dtype_of(out, "out");
  call.rows_per_expert = rows_per_expert.data_ptr<int64_t>();
  call.w13_bias = floats_in(w13_bias, experts * 2 * inter, "w13_bias");
  call.w2_bias = floats_in(w2_bias, experts * hidden, "w2_bias");
  call.clamped = alpha.has_value(), call.alpha = static_cast<float>(alpha.value_or(0.0));
  call.limit = static_cast<float>(limit.value_or(0.0));
  run_and_record("experts_int8", call, &ExpertsCall::tokens, run_experts_int8,
                 {x, w13, w2, topk_weights, topk_ids, out, rows_per_expert, w13_scales, w2_scales, or_none(w13_bias),
                  or_none(w2_bias)},
                 is_in_record(out));
  return {out, rows_per_expert};
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const at::Tensor& scales) {
  check(x, 2, "x");
  check_int8(weight, 2, "weight");
  const int64_t n = weight.size(0), k = weight.size(1);
  TORCH_CHECK(x.size(1) == k, "x is ", x.sizes(), " and the weight ", weight.sizes());
  at::Tensor bias_f32;
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n, "bias is ", bias->sizes(), " for ", n, " outputs");
    bias_f32 = bias->to(at::kFloat).contiguous();
  }
  auto out = at::empty({x.size(0), n}, x.options());
  const auto* data = reinterpret_cast<const uint8_t*>(weight.data_ptr<int8_t>());
  const PackedInt8 packed{data, scales_of(weight, scales, n, "weight"), n, k};
  const LinearInt8Call call{x.size(0), x.data_ptr(), dtype_of(x, "x"), packed,
                            bias.has_value() ? bias_f32.data_ptr<float>() : nullptr, out.data_ptr()};
  run_and_record("linear_int8", call, &LinearInt8Call::rows, run_linear_int8, {x, weight, scales, bias_f32, out});
  return out;
}

std::string kernel_name() { return int8_kernel().name; }

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("pack_quads_(Tensor(a!) weight) -> ()");
  library.def("unpack_quads_(Tensor(a!) weight) -> ()");
  library.def(
      "experts_int8(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, bool f32_output, Tensor "
      "w13_scales, Tensor w2_scales, Tensor? w13_bias, Tensor? w2_bias, float? alpha, float? limit) -> (Tensor, Tensor)");
  library.def("linear_int8(Tensor x, Tensor weight, Tensor? bias, Tensor scales) -> Tensor");
  library.def("int8_kernel() -> str", sgl_batch::kernel_name);
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_quads_", sgl_batch::pack);
  library.impl("unpack_quads_", sgl_batch::unpack);
  library.impl("experts_int8", sgl_batch::experts);
  library.impl("linear_int8", sgl_batch::linear);
}
