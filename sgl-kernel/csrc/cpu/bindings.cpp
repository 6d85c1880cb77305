// Owns the operators as torch sees them: shapes and number types are checked here, nothing is computed.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "attention.h"
#include "coded.h"
#include "experts.h"
#include "gated.h"
#include "linear.h"
#include "norm_rope.h"
#include "packing.h"
#include "piece_record.h"
#include "record.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

void check_pairs(const at::Tensor& weight) {
  TORCH_CHECK(weight.size(2) % 2 == 0, "a weight of ", weight.scalar_type(), " has ", weight.size(2),
              " inputs; packing needs an even number");
}

template <typename Each>
void each_matrix(at::Tensor& weight, const Each& each) {
  check(weight, 3, "weight");
  const DType dtype = weight_dtype_of(weight, "weight");
  const int64_t n = weight.size(1), k = weight.size(2);
  if (dtype != DType::kF32) check_pairs(weight);
  const auto scratch = at::empty({num_threads(), kPanel * k}, weight.options());
  auto* base = static_cast<char*>(weight.data_ptr());
  run_tasks(weight.size(0), [&](int64_t index, int thread) {
    each(base + index * n * k * size_of(dtype), n, k, dtype,
         static_cast<char*>(scratch.data_ptr()) + thread * kPanel * k * size_of(dtype));
  });
}

void pack(at::Tensor weight) { each_matrix(weight, pack_matrix); }
void unpack(at::Tensor weight) { each_matrix(weight, unpack_matrix); }

void round_to_int8(const at::Tensor& weight, at::Tensor rounded, at::Tensor scales) {
  check(weight, 3, "weight");
  const DType dtype = dtype_of(weight, "weight");
  const int64_t rows = weight.size(0) * weight.size(1), k = weight.size(2);
  TORCH_CHECK(rounded.is_contiguous() && rounded.scalar_type() == at::kChar && rounded.sizes() == weight.sizes(), "rounded is ",
              rounded.scalar_type(), rounded.sizes(), "; use contiguous int8 ", weight.sizes());
  TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == at::kFloat && scales.numel() == rows, "scales are ",
              scales.scalar_type(), scales.sizes(), "; use contiguous float32, one for each of ", rows, " outputs");
  const auto scratch = at::empty({num_threads(), k}, at::kFloat);
  const auto* from = static_cast<const char*>(weight.data_ptr());
  auto* to = rounded.data_ptr<int8_t>();
  auto *exact = scratch.data_ptr<float>(), *scale = scales.data_ptr<float>();
  run_tasks(divide_up(rows, kPanel), [&](int64_t panel, int thread) {
    for (int64_t row = panel * kPanel; row < std::min((panel + 1) * kPanel, rows); ++row) {
      const char* const own = from + row * k * static_cast<int64_t>(size_of(dtype));
      scale[row] = dtype == DType::kBf16 ? integers_of_row(reinterpret_cast<const uint16_t*>(own), k, to + row * k) : 0.0f;
      if (scale[row] == 0.0f) scale[row] = round_row(own, dtype, k, exact + thread * k, to + row * k);
    }
  });
}

// Calls each(panel, its width, k, number of its mark, scratch), narrow panels too.
template <typename Each>
void each_panel(at::Tensor& weight, const Each& each) {
  check(weight, 3, "weight");
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16, "weight is ", weight.scalar_type(), "; only bfloat16 has codes");
  const int64_t n = weight.size(1), k = weight.size(2), panels = divide_up(n, kPanel);
  const auto scratch = at::empty({num_threads(), kPanel * k}, weight.options());
  auto* base = static_cast<char*>(weight.data_ptr());
  run_tasks(weight.size(0) * panels, [&](int64_t index, int thread) {
    const int64_t matrix = index / panels, panel = index % panels;
    each(base + 2 * k * (matrix * n + panel * kPanel), std::min<int64_t>(kPanel, n - panel * kPanel), k, index,
         static_cast<char*>(scratch.data_ptr()) + 2 * kPanel * k * thread);
  });
}

at::Tensor pack_coded(at::Tensor weight) {
  check(weight, 3, "weight");
  check_pairs(weight);
  auto marks = at::zeros({weight.size(0), divide_up(weight.size(1), kPanel)}, weight.options().dtype(at::kByte));
  auto* first = marks.data_ptr<uint8_t>();
  each_panel(weight, [first](void* panel, int64_t width, int64_t k, int64_t mark, void* scratch) {
    if (width == kPanel)
      first[mark] = pack_and_code(panel, k, scratch);
    else
      pack_matrix(panel, width, k, DType::kBf16, scratch);
  });
  return marks;
}

const uint8_t* marks_in(const std::optional<at::Tensor>& marks, const at::Tensor& weight, int64_t matrices, int64_t n, const char* name) {
  if (!marks.has_value()) return nullptr;
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16, name, " is ", weight.scalar_type(), " with marks of coded bfloat16");
  TORCH_CHECK(marks->is_contiguous() && marks->scalar_type() == at::kByte && marks->numel() == matrices * divide_up(n, kPanel),
              "marks of ", name, " are ", marks->scalar_type(), marks->sizes(), "; use contiguous uint8, one for each of ",
              divide_up(n, kPanel), " panels of ", matrices, " matrices");
  return marks->data_ptr<uint8_t>();
}

void uncode(at::Tensor weight, const at::Tensor& marks) {
  const auto* first = marks_in(marks, weight, weight.size(0), weight.size(1), "weight");
  each_panel(weight, [first](void* panel, int64_t, int64_t k, int64_t mark, void* scratch) {
    uncode_panel(panel, k, first[mark], scratch);
  });
}

const int32_t* slots_in(const std::optional<at::Tensor>& slots, int64_t num_slots) {
  if (!slots.has_value()) return nullptr;
  check(*slots, 1, "slots");
  TORCH_CHECK(slots->scalar_type() == at::kInt, "slots are ", slots->scalar_type(), "; use int32");
  const auto* first = slots->data_ptr<int32_t>();
  for (int64_t i = 0; i < slots->size(0); ++i)
    TORCH_CHECK(first[i] < num_slots, "expert ", i, " lies in slot ", first[i], " of ", num_slots);
  return first;
}

std::tuple<at::Tensor, at::Tensor> experts(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2,
                                           const at::Tensor& topk_weights, const at::Tensor& topk_ids, bool f32_output,
                                           const std::optional<at::Tensor>& w13_scales,
                                           const std::optional<at::Tensor>& w2_scales,
                                           const std::optional<at::Tensor>& slots,
                                           const std::optional<at::Tensor>& w13_bias,
                                           const std::optional<at::Tensor>& w2_bias, std::optional<double> alpha,
                                           std::optional<double> limit, const std::optional<at::Tensor>& w13_marks,
                                           const std::optional<at::Tensor>& w2_marks) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "x is ", x.sizes(), " with strides ", x.strides(), "; rows are contiguous");
  check(w13, 3, "w13");
  check(w2, 3, "w2");
  const int64_t tokens = x.size(0), hidden = x.size(1), num_slots = w13.size(0);
  const int64_t inter = has_scales_beside(w13) ? w13.size(1) / 2 : inputs_of(w2, w2.size(2));
  TORCH_CHECK(w13.size(1) == 2 * inter, "w13 is ", w13.sizes(), ", not [", num_slots, ", ", 2 * inter, ", ", hidden, "]");
  TORCH_CHECK(w2.size(0) == num_slots && w2.size(1) == hidden, "w2 is ", w2.sizes(), ", not [", num_slots, ", ", hidden,
              ", ", inter, "]");
  const int32_t* slot_of = slots_in(slots, num_slots);
  const int64_t num_experts = slots.has_value() ? slots->size(0) : num_slots;
  const DType w_dtype = expert_dtype_of(w13, hidden, w2, inter);
  check_choices(topk_weights, topk_ids, tokens);
  TORCH_CHECK(alpha.has_value() == limit.has_value(), "alpha and limit are given together");
  const float* bias13 = floats_in(w13_bias, num_experts * 2 * inter, "w13_bias");
  const float* bias2 = floats_in(w2_bias, num_experts * hidden, "w2_bias");
  auto out = experts_out(tokens, hidden, f32_output ? x.options().dtype(at::kFloat) : x.options());
  auto rows_per_expert = at::zeros({num_experts}, x.options().dtype(at::kLong));
  const ExpertsCall call{tokens, topk_ids.size(1), hidden, inter, num_experts, x.data_ptr(), x.stride(0), dtype_of(x, "x"),
                         w13.data_ptr(), w2.data_ptr(), w_dtype,
                         scales_of(w13, w13_scales, num_slots * 2 * inter, "w13"),
                         scales_of(w2, w2_scales, num_slots * hidden, "w2"), topk_weights.data_ptr<float>(),
                         topk_ids.data_ptr<int32_t>(), out.data_ptr(), dtype_of(out, "out"), rows_per_expert.data_ptr<int64_t>(),
                         slot_of, bias13, bias2, alpha.has_value(), static_cast<float>(alpha.value_or(0.0)),
                         static_cast<float>(limit.value_or(0.0)), ExpertsPart::kBoth, nullptr, 0,
                         marks_in(w13_marks, w13, num_slots * 2, inter, "w13"), marks_in(w2_marks, w2, num_slots, hidden, "w2")};
  run_and_record("experts", call, &ExpertsCall::tokens, run_experts,
                 {x, w13, w2, topk_weights, topk_ids, out, rows_per_expert, or_none(w13_scales), or_none(w2_scales),
                  or_none(slots), or_none(w13_bias), or_none(w2_bias), or_none(w13_marks), or_none(w2_marks)},
                 is_in_record(out));
  return {out, rows_per_expert};
}

std::tuple<at::Tensor, at::Tensor> experts_up(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& topk_weights,
                                              const at::Tensor& topk_ids) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "x is ", x.sizes(), " with strides ", x.strides(), "; rows are contiguous");
  check(w13, 3, "w13");
  const int64_t tokens = x.size(0), hidden = x.size(1), experts = w13.size(0), inter = w13.size(1) / 2;
  check_choices(topk_weights, topk_ids, tokens);
  TORCH_CHECK(w13.size(1) == 2 * inter && inter > 0 && w13.size(2) == hidden, "w13 is ", w13.sizes(), " for x of ", x.sizes());
  const DType w_dtype = dtype_of(w13, "w13"), row_dtype = isa().row_dtype(w_dtype);
  const auto rows = x.options().dtype(row_dtype == DType::kF32 ? at::kFloat : at::kBFloat16);
  const int64_t width = (inter + kPanel - 1) / kPanel * kPanel;
  auto between = at::zeros({tokens * topk_ids.size(1), width}, rows);
  auto rows_per_expert = at::zeros({experts}, x.options().dtype(at::kLong));
  ExpertsCall call{};
  call.tokens = tokens, call.top_k = topk_ids.size(1), call.hidden = hidden, call.inter = inter, call.experts = experts;
  call.x = x.data_ptr(), call.x_stride = x.stride(0), call.x_dtype = dtype_of(x, "x");
  call.w13 = w13.data_ptr(), call.w2 = w13.data_ptr(), call.w_dtype = w_dtype;
  call.topk_weights = topk_weights.data_ptr<float>(), call.topk_ids = topk_ids.data_ptr<int32_t>();
  call.rows_per_expert = rows_per_expert.data_ptr<int64_t>();
  call.part = ExpertsPart::kUp, call.between = between.data_ptr(), call.between_stride = width * between.element_size();
  run_and_record("experts_up", call, &ExpertsCall::tokens, run_experts, {x, w13, topk_weights, topk_ids, between, rows_per_expert});
  return {between.narrow(1, 0, inter), rows_per_expert};
}

at::Tensor experts_down(const at::Tensor& between, const at::Tensor& w2, const at::Tensor& topk_weights,
                        const at::Tensor& topk_ids) {
  check(between, 2, "between");
  check(w2, 3, "w2");
  const int64_t tokens = topk_ids.size(0), experts = w2.size(0), hidden = w2.size(1), inter = w2.size(2);
  check_choices(topk_weights, topk_ids, tokens);
  const DType w_dtype = dtype_of(w2, "w2"), row_dtype = isa().row_dtype(w_dtype);
  TORCH_CHECK(hidden > 0, "w2 is ", w2.sizes(), ", without outputs");
  TORCH_CHECK(between.size(0) == topk_ids.numel() && between.size(1) == inter && dtype_of(between, "between") == row_dtype,
              "between is ", between.scalar_type(), between.sizes(), " for ", topk_ids.numel(), " choices and w2 of ", w2.sizes());
  auto out = at::empty({tokens, hidden}, between.options().dtype(at::kFloat));
  auto rows_per_expert = at::zeros({experts}, between.options().dtype(at::kLong));
  ExpertsCall call{};
  call.tokens = tokens, call.top_k = topk_ids.size(1), call.hidden = hidden, call.inter = inter, call.experts = experts;
  call.x = between.data_ptr(), call.x_dtype = row_dtype;
  call.w13 = w2.data_ptr(), call.w2 = w2.data_ptr(), call.w_dtype = w_dtype;
  call.topk_weights = topk_weights.data_ptr<float>(), call.topk_ids = topk_ids.data_ptr<int32_t>();
  call.out = out.data_ptr(), call.out_dtype = DType::kF32;
  call.rows_per_expert = rows_per_expert.data_ptr<int64_t>();
  call.part = ExpertsPart::kDown, call.between = between.data_ptr(), call.between_stride = inter * between.element_size();
  run_and_record("experts_down", call, &ExpertsCall::tokens, run_experts, {between, w2, topk_weights, topk_ids, out, rows_per_expert});
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& scales) {
  check(x, 2, "x");
  check(weight, 2, "weight");
  const int64_t n = weight.size(0), k = x.size(1);
  const DType w_dtype = matrix_dtype_of(weight, n, k, "weight");
  at::Tensor bias_f32;
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n, "bias is ", bias->sizes(), " for ", n, " outputs");
    bias_f32 = bias->to(at::kFloat).contiguous();
  }
  auto out = at::empty({x.size(0), n}, x.options());
  const PackedWeight packed{weight.data_ptr(), w_dtype, scales_of(weight, scales, n, "weight"), n, k};
  const LinearCall call{x.size(0), 1, x.data_ptr(), k, 0, dtype_of(x, "x"), packed,
                        bias.has_value() ? bias_f32.data_ptr<float>() : nullptr, out.data_ptr(), n, 0};
  run_and_record("linear", call, &LinearCall::rows, run_linear, {x, weight, bias_f32, or_none(scales), out});
  return out;
}

at::Tensor gated(const at::Tensor& x, const at::Tensor& w13, int64_t first, int64_t last,
                 const std::optional<at::Tensor>& scales) {
  check(x, 2, "x");
  check(w13, 2, "w13");
  const int64_t inter = w13.size(0) / 2, hidden = x.size(1);
  TORCH_CHECK(w13.size(0) == 2 * inter, "w13 is ", w13.sizes(), ", not two matrices of as many outputs");
  TORCH_CHECK(first >= 0 && first <= last && last <= inter && first % kPanel == 0 && (last % kPanel == 0 || last == inter),
              "channels ", first, " to ", last, " of ", inter, "; use whole panels of ", kPanel);
  const DType w_dtype = matrix_dtype_of(w13, inter, hidden, "w13");
  const at::ScalarType out_dtype = isa().row_dtype(w_dtype) == DType::kF32 ? at::kFloat : at::kBFloat16;
  auto out = at::empty({x.size(0), last - first}, x.options().dtype(out_dtype));
  const GatedCall call{x.size(0), hidden, inter, first, last, x.data_ptr(), dtype_of(x, "x"), w13.data_ptr(), w_dtype,
                       scales_of(w13, scales, 2 * inter, "w13"), out.data_ptr()};
  run_and_record("gated", call, &GatedCall::rows, run_gated, {x, w13, or_none(scales), out});
  return out;
}

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                                            const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "x is ", x.sizes(), " with strides ", x.strides(), "; rows are contiguous");
  check(weight, 1, "weight");
  TORCH_CHECK(weight.size(0) == x.size(1), "weight is ", weight.sizes(), " for rows of ", x.size(1));
  auto out = at::empty(x.sizes(), x.options());
  at::Tensor summed;
  if (residual.has_value()) {
    check(*residual, 2, "residual");
    TORCH_CHECK(residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type(), "residual is ",
                residual->scalar_type(), residual->sizes(), " beside x of ", x.scalar_type(), x.sizes());
    summed = at::empty(x.sizes(), x.options());
  }
  const RmsNormCall call{x.size(0), x.size(1), x.data_ptr(), x.stride(0), residual.has_value() ? residual->data_ptr() : nullptr,
                         residual.has_value() ? summed.data_ptr() : nullptr, weight.data_ptr(), dtype_of(weight, "weight"),
                         static_cast<float>(eps), out.data_ptr(), dtype_of(x, "x")};
  run_and_record("rms_norm", call, &RmsNormCall::rows, run_rms_norm, {x, or_none(residual), summed, weight, out});
  return {out, residual.has_value() ? summed : out};
}

void add_rms_norm(at::Tensor x, at::Tensor residual, const at::Tensor& weight, double eps) {
  check(x, 2, "x");
  check(residual, 2, "residual");
  check(weight, 1, "weight");
  TORCH_CHECK(residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type(), "residual is ", residual.scalar_type(),
              residual.sizes(), " beside x of ", x.scalar_type(), x.sizes());
  TORCH_CHECK(weight.size(0) == x.size(1), "weight is ", weight.sizes(), " for rows of ", x.size(1));
  const RmsNormCall call{x.size(0), x.size(1), x.data_ptr(), x.size(1), residual.data_ptr(), residual.data_ptr(),
                         weight.data_ptr(), dtype_of(weight, "weight"), static_cast<float>(eps), x.data_ptr(), dtype_of(x, "x")};
  run_and_record("rms_norm", call, &RmsNormCall::rows, run_rms_norm, {x, residual, weight});
}

// Checks the first positions of so many rows.
auto position_check(const at::Tensor& positions, const at::Tensor& cos_sin) {
  return [first = positions.data_ptr<int64_t>(), limit = cos_sin.size(0)](int64_t rows) {
    const auto [least, most] = std::minmax_element(first, first + rows);
    TORCH_CHECK(rows == 0 || (*least >= 0 && *most < limit), "a position lies outside of the ", limit, " positions of cos_sin");
  };
}

RotaryCall rotary_call(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& cos_sin, int64_t heads,
                       int64_t head_dim, bool neox) {
  check(positions, 1, "positions");
  check(cos_sin, 2, "cos_sin");
  TORCH_CHECK(positions.size(0) == x.size(0) && positions.scalar_type() == at::kLong, "positions are ",
              positions.scalar_type(), positions.sizes(), " for ", x.size(0), " rows; use int64");
  TORCH_CHECK(cos_sin.size(1) % 2 == 0 && cos_sin.size(1) <= head_dim, "cos_sin is ", cos_sin.sizes(),
              "; use [positions, an even number up to ", head_dim, "]");
  if (x.size(0) == 0) return {};
  position_check(positions, cos_sin)(x.size(0));
  return {x.size(0), heads, head_dim, cos_sin.size(1), positions.data_ptr<int64_t>(), cos_sin.data_ptr(),
          dtype_of(cos_sin, "cos_sin"), neox, x.data_ptr(), x.stride(0), dtype_of(x, "x")};
}

void rotary(at::Tensor x, const at::Tensor& positions, const at::Tensor& cos_sin, int64_t head_dim, bool neox) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.size(1) % head_dim == 0, "x is ", x.sizes(), " with strides ",
              x.strides(), " for heads of ", head_dim);
  const RotaryCall call = rotary_call(x, positions, cos_sin, x.size(1) / head_dim, head_dim, neox);
  const auto run = [call](int64_t rows) {
    RotaryCall own = call;
    own.rows = rows;
    run_rotary(own);
  };
  run_and_record("rotary", x.size(0), {x, positions, cos_sin}, run, position_check(positions, cos_sin));
}

void qk_norm_rope(at::Tensor qkv, const at::Tensor& q_weight, const at::Tensor& k_weight, double eps,
                  const at::Tensor& positions, const at::Tensor& cos_sin, int64_t q_heads, int64_t k_heads, bool neox) {
  check(q_weight, 1, "q_weight");
  check(k_weight, 1, "k_weight");
  const int64_t head_dim = q_weight.size(0), heads = q_heads + k_heads;
  TORCH_CHECK(k_weight.size(0) == head_dim && k_weight.scalar_type() == q_weight.scalar_type(), "q_weight is ",
              q_weight.scalar_type(), q_weight.sizes(), " and k_weight ", k_weight.scalar_type(), k_weight.sizes());
  TORCH_CHECK(qkv.dim() == 2 && qkv.stride(1) == 1 && qkv.size(1) >= heads * head_dim, "qkv is ", qkv.sizes(),
              " with strides ", qkv.strides(), " for ", heads, " heads of ", head_dim);
  const QkNormRopeCall call{rotary_call(qkv, positions, cos_sin, heads, head_dim, neox), q_heads, q_weight.data_ptr(),
                            k_weight.data_ptr(), dtype_of(q_weight, "q_weight"), static_cast<float>(eps)};
  const auto run = [call](int64_t rows) {
    QkNormRopeCall own = call;
    own.heads.rows = rows;
    run_qk_norm_rope(own);
  };
  run_and_record("qk_norm_rope", qkv.size(0), {qkv, q_weight, k_weight, positions, cos_sin}, run,
                 position_check(positions, cos_sin));
}

// How many heads of so many numbers pages have, of which these may be some.
int64_t heads_of_page(const at::Tensor& pages, int64_t numbers) {
  const int64_t between = pages.size(0) > 1 ? pages.stride(0) : pages.size(1) * numbers;
  TORCH_CHECK(pages.size(0) == 0 || (pages[0].is_contiguous() && between % numbers == 0 && between >= pages.size(1) * numbers),
              "pages are ", pages.sizes(), " with strides ", pages.strides(), "; the heads of each are contiguous");
  return between / numbers;
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k_pages, const at::Tensor& v_pages, const at::Tensor& starts,
                     const at::Tensor& lengths, const at::Tensor& table_starts, const at::Tensor& tables, int64_t page,
                     int64_t dim, double scaling, int64_t window, const std::optional<at::Tensor>& sinks) {
  TORCH_CHECK(q.dim() == 2 && q.stride(1) == 1 && q.size(1) % dim == 0, "q is ", q.sizes(), " with strides ",
              q.strides(), " for heads of ", dim);
  TORCH_CHECK(k_pages.dim() > 2 && v_pages.dim() > 2 && k_pages.numel() == v_pages.numel(), "pages of keys are ", k_pages.sizes(),
              " and of values ", v_pages.sizes());
  TORCH_CHECK(k_pages.scalar_type() == q.scalar_type() && v_pages.scalar_type() == q.scalar_type(), "q is ",
              q.scalar_type(), " and pages are ", k_pages.scalar_type());
  TORCH_CHECK(q.scalar_type() == at::kFloat || (page % 2 == 0 && dim % 2 == 0), "bfloat16 pages of ", page,
              " tokens and heads of ", dim, ": both must be even");
  const int64_t q_heads = q.size(1) / dim, kv_heads = k_pages.size(1);
  TORCH_CHECK(k_pages.numel() == k_pages.size(0) * kv_heads * page * dim && q_heads % kv_heads == 0, "pages are ",
              k_pages.sizes(), " for ", q_heads, " query heads of ", dim, " and pages of ", page, " tokens");
  const int64_t page_heads = heads_of_page(k_pages, page * dim);
  TORCH_CHECK(heads_of_page(v_pages, page * dim) == page_heads, "pages of keys have ", page_heads, " heads, and those of values not");
  TORCH_CHECK(window >= 0, "a row sees ", window, " tokens; use 0 for all");
  const float* sink = floats_in(sinks, q_heads, "sinks");
  check_pieces(starts, lengths, table_starts, tables, q.size(0), page, k_pages.size(0));
  auto out = at::empty({q.size(0), q.size(1)}, q.options());
  const AttentionCall call{lengths.size(0), q_heads, kv_heads, page_heads, dim, page, q.data_ptr(), q.stride(0), k_pages.data_ptr(),
                           v_pages.data_ptr(), dtype_of(q, "q"), starts.data_ptr<int64_t>(), lengths.data_ptr<int64_t>(),
                           table_starts.data_ptr<int64_t>(), tables.data_ptr<int64_t>(), static_cast<float>(scaling), window, sink,
                           out.data_ptr()};
  run_and_record("attention", call, run_attention, {starts, lengths, table_starts, tables, page, k_pages.size(0)},
                 {q, k_pages, v_pages, or_none(sinks), out});
  return out;
}

std::string isa_name() { return isa().name; }
std::string isa_names() { return runnable_isas(); }

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY(sgl_batch_kernel, library) {
  library.def("pack_(Tensor(a!) weight) -> ()");
  library.def("unpack_(Tensor(a!) weight) -> ()");
  library.def("round_to_int8_(Tensor weight, Tensor(a!) rounded, Tensor(b!) scales) -> ()");
  library.def("pack_coded_(Tensor(a!) weight) -> Tensor");
  library.def("uncode_(Tensor(a!) weight, Tensor marks) -> ()");
  library.def(
      "experts(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, bool f32_output, Tensor? "
      "w13_scales, Tensor? w2_scales, Tensor? slots, Tensor? w13_bias, Tensor? w2_bias, float? alpha, float? limit, "
      "Tensor? w13_marks, Tensor? w2_marks) -> (Tensor, Tensor)");
  library.def("experts_up(Tensor x, Tensor w13, Tensor topk_weights, Tensor topk_ids) -> (Tensor, Tensor)");
  library.def("experts_down(Tensor between, Tensor w2, Tensor topk_weights, Tensor topk_ids) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? scales) -> Tensor");
  library.def("gated(Tensor x, Tensor w13, int first, int last, Tensor? scales) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  library.def("rotary(Tensor(a!) x, Tensor positions, Tensor cos_sin, int head_dim, bool neox) -> ()");
  library.def("qk_norm_rope(Tensor(a!) qkv, Tensor q_weight, Tensor k_weight, float eps, Tensor positions, "
              "Tensor cos_sin, int q_heads, int k_heads, bool neox) -> ()");
  library.def(
      "attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor starts, Tensor lengths, Tensor table_starts, Tensor "
      "tables, int page, int dim, float scaling, int window, Tensor? sinks) -> Tensor");
  library.def("isa() -> str", sgl_batch::isa_name);
  library.def("runnable_isas() -> str", sgl_batch::isa_names);
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_", sgl_batch::pack);
  library.impl("unpack_", sgl_batch::unpack);
  library.impl("round_to_int8_", sgl_batch::round_to_int8);
  library.impl("pack_coded_", sgl_batch::pack_coded);
  library.impl("uncode_", sgl_batch::uncode);
  library.impl("experts", sgl_batch::experts);
  library.impl("experts_up", sgl_batch::experts_up);
  library.impl("experts_down", sgl_batch::experts_down);
  library.impl("linear", sgl_batch::linear);
  library.impl("gated", sgl_batch::gated);
  library.impl("rms_norm", sgl_batch::rms_norm);
  library.impl("add_rms_norm_", sgl_batch::add_rms_norm);
  library.impl("rotary", sgl_batch::rotary);
  library.impl("qk_norm_rope", sgl_batch::qk_norm_rope);
  library.impl("attention", sgl_batch::attention);
}
