// Owns the choice of experts as torch sees it: shapes and number types are checked here.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "record.h"
#include "rows.h"
#include "tensor_checks.h"
#include "topk.h"

namespace sgl_batch {
namespace {

// As a rule has it: in f32, with room behind.
std::vector<float> bias_of(const std::optional<at::Tensor>& bias, int64_t experts) {
  if (!bias.has_value()) return {};
  check(*bias, 1, "bias");
  TORCH_CHECK(bias->size(0) == experts, "bias is ", bias->sizes(), " for ", experts, " experts");
  std::vector<float> padded(experts + kPanel);
  read_row(padded.data(), bias->data_ptr(), dtype_of(*bias, "bias"), experts);
  return padded;
}

std::tuple<at::Tensor, at::Tensor> topk(const at::Tensor& logits, int64_t top_k, bool sigmoid, bool renormalize,
                                        const std::optional<at::Tensor>& bias, int64_t groups, int64_t kept_groups) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0, "logits are ", logits.sizes(),
              " with strides ", logits.strides(), "; rows are contiguous and have a number for each expert");
  const int64_t rows = logits.size(0), experts = logits.size(1);
  TORCH_CHECK(groups >= 1 && experts % groups == 0, experts, " experts do not make ", groups, " equal groups");
  TORCH_CHECK(kept_groups >= 1 && kept_groups <= groups, "a row keeps ", kept_groups, " of ", groups, " groups");
  const int64_t size = experts / groups;
  TORCH_CHECK(top_k >= 1 && top_k <= kept_groups * size, "a row chooses ", top_k, " of ", kept_groups * size, " experts in ",
              kept_groups, " groups");
  TORCH_CHECK(!bias.has_value() || kept_groups == groups || size > 1,
              "groups of one expert have no two best, by whose sum they rank where there is a bias");
  const std::vector<float> padded = bias_of(bias, experts);
  auto weights = at::empty({rows, top_k}, logits.options().dtype(at::kFloat));
  auto ids = at::empty({rows, top_k}, logits.options().dtype(at::kInt));
  const TopKCall call{rows, logits.data_ptr(), logits.stride(0), dtype_of(logits, "logits"),
                      {experts, groups, kept_groups, top_k, sigmoid, renormalize, nullptr},
                      weights.data_ptr<float>(), ids.data_ptr<int32_t>()};
  const auto run = [call, padded](int64_t some) {
    TopKCall own = call;
    own.rows = some;
    own.rule.bias = padded.empty() ? nullptr : padded.data();
    run_topk(own);
  };
  run_and_record("topk", rows, {logits, weights, ids}, run, [](int64_t) {});
  return {weights, ids};
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def(
      "topk(Tensor logits, int top_k, bool sigmoid, bool renormalize, Tensor? bias, int groups, int kept_groups) -> (Tensor, "
      "Tensor)");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) { library.impl("topk", sgl_batch::topk); }
