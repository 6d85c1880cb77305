// Owns the operators of the exchange between ranks as torch sees them; nothing is computed here.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "exchange.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

Exchange exchange_of(const std::vector<at::Tensor>& regions, int64_t rank, double spin_us, double timeout_s) {
  TORCH_CHECK(!regions.empty() && regions.size() <= kMostRanks, regions.size(), " ranks share memory; at most ", kMostRanks);
  TORCH_CHECK(rank >= 0 && rank < static_cast<int64_t>(regions.size()), "rank ", rank, " of ", regions.size());
  std::vector<char*> begins;
  for (const auto& region : regions) {
    check(region, 1, "a region");
    TORCH_CHECK(region.scalar_type() == at::kByte && region.size(0) == regions[0].size(0) && region.size(0) >= (1 << 20),
                "a region is ", region.scalar_type(), region.sizes(), "; use uint8, all of one size, at least 1 MiB");
    begins.push_back(static_cast<char*>(region.data_ptr()));
  }
  return Exchange(begins, static_cast<size_t>(regions[0].size(0)), static_cast<int>(rank),
                  {static_cast<int64_t>(spin_us * 1e3), static_cast<int64_t>(timeout_s * 1e9)});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, int64_t> exchange_dispatch(
    const std::vector<at::Tensor>& regions, int64_t rank, const at::Tensor& x, const at::Tensor& topk_ids,
    const at::Tensor& topk_weights, int64_t experts, double spin_us, double timeout_s) {
  TORCH_CHECK(x.dim() == 2 && (x.stride(1) == 1 || x.numel() == 0), "x is ", x.sizes(), " with strides ", x.strides(),
              "; rows are contiguous");
  check(topk_ids, 2, "topk_ids");
  check(topk_weights, 2, "topk_weights");
  TORCH_CHECK(topk_ids.scalar_type() == at::kInt && topk_weights.scalar_type() == at::kFloat && topk_ids.size(0) == x.size(0) &&
                  topk_ids.sizes() == topk_weights.sizes(),
              "topk_ids are ", topk_ids.scalar_type(), topk_ids.sizes(), " and topk_weights ", topk_weights.scalar_type(),
              topk_weights.sizes(), " for ", x.size(0), " tokens; use int32 and float32");
  Exchange exchange = exchange_of(regions, rank, spin_us, timeout_s);
  const int64_t top_k = topk_ids.size(1), hidden = x.size(1), bytes = static_cast<int64_t>(x.element_size());
  const TokenFormat format{x.size(0), top_k, experts, hidden, bytes, static_cast<int64_t>(x.scalar_type())};
  try {
    exchange.publish_tokens(format, static_cast<const char*>(x.data_ptr()), static_cast<size_t>(x.stride(0) * bytes),
                            topk_ids.data_ptr<int32_t>(), topk_weights.data_ptr<float>());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  const int64_t rows = exchange.choose_rows();
  auto ids = at::empty({rows, top_k}, topk_ids.options());
  auto weights = at::empty({rows, top_k}, topk_weights.options());
  char* received = exchange.take_rows(ids.data_ptr<int32_t>(), weights.data_ptr<float>());
  auto taken = at::from_blob(received, {rows, hidden}, [region = regions[rank]](void*) {}, x.options());
  return {taken, ids, weights, exchange.waited_ns()};
}

std::tuple<at::Tensor, int64_t> exchange_combine(const std::vector<at::Tensor>& regions, int64_t rank,
                                                 const at::Tensor& sums, int64_t tokens, double spin_us, double timeout_s) {
  check(sums, 2, "sums");
  TORCH_CHECK(sums.scalar_type() == at::kFloat, "sums are ", sums.scalar_type(), "; use float32");
  Exchange exchange = exchange_of(regions, rank, spin_us, timeout_s);
  exchange.publish_sums(sums.data_ptr<float>(), sums.size(0));
  auto out = at::empty({tokens, sums.size(1)}, sums.options());
  exchange.combine(out.data_ptr<float>());
  return {out, exchange.waited_ns()};
}

std::tuple<at::Tensor, int64_t> gather(const std::vector<at::Tensor>& regions, int64_t rank,
                                       const at::Tensor& own, double spin_us, double timeout_s) {
  check_index(own, "own");
  TORCH_CHECK(own.size(0) <= kMostBoardValues, own.size(0), " values to gather; at most ", kMostBoardValues);
  Exchange exchange = exchange_of(regions, rank, spin_us, timeout_s);
  auto all = at::empty({static_cast<int64_t>(regions.size()), own.size(0)}, own.options());
  exchange.gather(own.data_ptr<int64_t>(), static_cast<int>(own.size(0)),
                  all.data_ptr<int64_t>());
  return {all, exchange.waited_ns()};
}

std::tuple<at::Tensor, int64_t> gather_columns(const std::vector<at::Tensor>& regions, int64_t rank, const at::Tensor& own,
                                               std::vector<int64_t> widths, double spin_us, double timeout_s) {
  TORCH_CHECK(own.dim() == 2 && (own.stride(1) == 1 || own.size(1) <= 1), "own columns are ", own.sizes(), " with strides ",
              own.strides(), "; rows are contiguous");
  Exchange exchange = exchange_of(regions, rank, spin_us, timeout_s);
  TORCH_CHECK(widths.size() == regions.size() && own.size(1) == widths[rank], own.size(1), " columns of rank ", rank,
              " where the ranks have ", widths);
  int64_t columns = 0;
  const int64_t bytes = static_cast<int64_t>(own.element_size());
  for (int64_t& width : widths) {
    columns += width;
    width *= bytes;
  }
  auto out = at::empty({own.size(0), columns}, own.options());
  try {
    exchange.gather_columns(static_cast<const char*>(own.data_ptr()), static_cast<size_t>(own.stride(0) * bytes), own.size(0),
                            widths, static_cast<char*>(out.data_ptr()));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  return {out, exchange.waited_ns()};
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def(
      "exchange_dispatch(Tensor[] regions, int rank, Tensor x, Tensor topk_ids, Tensor topk_weights, int "
      "experts, float spin_us, float timeout_s) -> (Tensor, Tensor, Tensor, int)");
  library.def(
      "exchange_combine(Tensor[] regions, int rank, Tensor sums, int tokens, float spin_us, float "
      "timeout_s) -> (Tensor, int)");
  library.def(
      "gather_columns(Tensor[] regions, int rank, Tensor own, int[] widths, float spin_us, float timeout_s) -> (Tensor, int)");
  library.def(
      "gather(Tensor[] regions, int rank, Tensor own, float spin_us, float timeout_s) -> (Tensor, int)");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("exchange_dispatch", sgl_batch::exchange_dispatch);
  library.impl("exchange_combine", sgl_batch::exchange_combine);
  library.impl("gather_columns", sgl_batch::gather_columns);
  library.impl("gather", sgl_batch::gather);
}
