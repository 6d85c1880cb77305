// Owns the operators of the exchange between ranks as torch sees them; nothing is computed here.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "exchange.h"
#include "record.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

// This rank's end of the exchanges through some memory.
struct End {
  std::vector<at::Tensor> regions;
  int64_t rank;
  Wait wait;

  Exchange open() const {
    std::vector<char*> begins;
    for (const auto& region : regions) begins.push_back(static_cast<char*>(region.data_ptr()));
    return Exchange(begins, static_cast<size_t>(regions[0].size(0)), static_cast<int>(rank), wait);
  }
};

End end_of(const std::vector<at::Tensor>& regions, int64_t rank, double spin_us, double timeout_s) {
  TORCH_CHECK(!regions.empty() && regions.size() <= kMostRanks, regions.size(), " ranks share memory; at most ", kMostRanks);
  TORCH_CHECK(rank >= 0 && rank < static_cast<int64_t>(regions.size()), "rank ", rank, " of ", regions.size());
  for (const auto& region : regions) {
    check(region, 1, "a region");
    TORCH_CHECK(region.scalar_type() == at::kByte && region.size(0) == regions[0].size(0) && region.size(0) >= (1 << 20),
                "a region is ", region.scalar_type(), region.sizes(), "; use uint8, all of one size, at least 1 MiB");
  }
  return {regions, rank, {static_cast<int64_t>(spin_us * 1e3), static_cast<int64_t>(timeout_s * 1e9)}};
}

struct Dispatch {
  End end;
  at::Tensor x, ids, weights;
  int64_t experts;

  // Exchanges the first `tokens` of its rows; returns how many rows came.
  int64_t run(int64_t tokens, int64_t& waited_ns) const {
    Exchange exchange = end.open();
    const auto bytes = static_cast<int64_t>(x.element_size());
    const TokenFormat format{tokens, ids.size(1), experts, x.size(1), bytes, static_cast<int64_t>(x.scalar_type())};
    try {
      exchange.publish_tokens(format, static_cast<const char*>(x.data_ptr()), static_cast<size_t>(x.stride(0) * bytes),
                              ids.data_ptr<int32_t>(), weights.data_ptr<float>());
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
    const int64_t rows = exchange.choose_rows();
    exchange.take_rows();
    waited_ns += exchange.waited_ns();
    return rows;
  }
};

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
  const Dispatch dispatch{end_of(regions, rank, spin_us, timeout_s), x, topk_ids, topk_weights, experts};
  int64_t waited_ns = 0;
  int64_t rows = dispatch.run(x.size(0), waited_ns);
  const int64_t top_k = topk_ids.size(1), hidden = x.size(1);
  const Exchange::Received received = dispatch.end.open().received();
  if (recording() != nullptr && rows == 0) {  // A tensor without rows has no address, which a record needs: one without a choice.
    std::fill_n(received.ids, top_k, -1);
    std::fill_n(received.weights, top_k, 0.0F);
    rows = 1;
  }
  const auto view = [&](void* data, int64_t columns, const at::TensorOptions& options) {
    return at::from_blob(data, {rows, columns}, [region = regions[rank]](void*) {}, options);
  };
  if (Record* record = recording()) {
    record->add("exchange_dispatch", x.size(0), {}, [dispatch](RecordRows& now) { now.here = dispatch.run(now.own, now.waited_ns); });
    record->go_on_with_received(view(received.sums, hidden, topk_weights.options()));
  }
  return {view(received.x, hidden, x.options()), view(received.ids, top_k, topk_ids.options()),
          view(received.weights, top_k, topk_weights.options()), waited_ns};
}

std::tuple<at::Tensor, int64_t> exchange_combine(const std::vector<at::Tensor>& regions, int64_t rank,
                                                 const at::Tensor& sums, int64_t tokens, double spin_us, double timeout_s) {
  check(sums, 2, "sums");
  TORCH_CHECK(sums.scalar_type() == at::kFloat, "sums are ", sums.scalar_type(), "; use float32");
  auto out = at::empty({tokens, sums.size(1)}, sums.options());
  const auto run = [end = end_of(regions, rank, spin_us, timeout_s), sums, out](int64_t count, int64_t& waited_ns) {
    Exchange exchange = end.open();
    exchange.publish_sums(sums.data_ptr<float>(), count);
    exchange.combine(out.data_ptr<float>());
    waited_ns += exchange.waited_ns();
  };
  int64_t waited_ns = 0;
  run(sums.size(0), waited_ns);
  if (Record* record = recording()) {
    const auto again = [run](RecordRows& now) {
      run(now.here, now.waited_ns);
      now.here = now.own;
    };
    record->add("exchange_combine", sums.size(0), {}, again, is_in_record(sums));
    record->go_on_with_own();
  }
  return {out, waited_ns};
}

std::tuple<at::Tensor, int64_t> gather(const std::vector<at::Tensor>& regions, int64_t rank,
                                       const at::Tensor& own, double spin_us, double timeout_s) {
  check_index(own, "own");
  TORCH_CHECK(own.size(0) <= kMostBoardValues, own.size(0), " values to gather; at most ", kMostBoardValues);
  Exchange exchange = end_of(regions, rank, spin_us, timeout_s).open();
  auto all = at::empty({static_cast<int64_t>(regions.size()), own.size(0)}, own.options());
  exchange.gather(own.data_ptr<int64_t>(), static_cast<int>(own.size(0)),
                  all.data_ptr<int64_t>());
  return {all, exchange.waited_ns()};
}

std::tuple<at::Tensor, int64_t> gather_columns(const std::vector<at::Tensor>& regions, int64_t rank, const at::Tensor& own,
                                               std::vector<int64_t> widths, double spin_us, double timeout_s) {
  TORCH_CHECK(own.dim() == 2 && (own.stride(1) == 1 || own.size(1) <= 1), "own columns are ", own.sizes(), " with strides ",
              own.strides(), "; rows are contiguous");
  const End end = end_of(regions, rank, spin_us, timeout_s);
  TORCH_CHECK(widths.size() == regions.size() && own.size(1) == widths[rank], own.size(1), " columns of rank ", rank,
              " where the ranks have ", widths);
  int64_t columns = 0;
  const int64_t bytes = static_cast<int64_t>(own.element_size());
  for (int64_t& width : widths) {
    columns += width;
    width *= bytes;
  }
  auto out = at::empty({own.size(0), columns}, own.options());
  const auto run = [end, own, widths, bytes, out](int64_t rows, int64_t& waited_ns) {
    Exchange exchange = end.open();
    try {
      exchange.gather_columns(static_cast<const char*>(own.data_ptr()), static_cast<size_t>(own.stride(0) * bytes), rows, widths,
                              static_cast<char*>(out.data_ptr()));
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
    waited_ns += exchange.waited_ns();
  };
  int64_t waited_ns = 0;
  run(own.size(0), waited_ns);
  if (Record* record = recording()) {
    // Rows may be choices, of which each row of the pass has as many.
    const int64_t each = record->rows() > 0 ? own.size(0) / record->rows() : 0;
    record->add("gather_columns", each > 0 && own.size(0) % record->rows() == 0 ? record->rows() : -1, {},
                [run, each](RecordRows& now) { run(now.here * each, now.waited_ns); });
  }
  return {out, waited_ns};
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
