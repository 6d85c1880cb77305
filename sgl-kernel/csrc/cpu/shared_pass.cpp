// Owns the small operators of a pass that all ranks compute together, each with its own experts, as calls that a record can have.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "rank_sums.h"
#include "record.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

void check_ids(const at::Tensor& ids) {
  check(ids, 2, "ids");
  TORCH_CHECK(ids.scalar_type() == at::kInt, "ids are ", ids.scalar_type(), "; use int32");
}

at::Tensor own_choices(const at::Tensor& ids, int64_t first, int64_t count) {
  check_ids(ids);
  auto out = at::empty(ids.sizes(), ids.options());
  const auto run = [from = ids.data_ptr<int32_t>(), to = out.data_ptr<int32_t>(), top_k = ids.size(1), first, count](int64_t rows) {
    std::transform(from, from + rows * top_k, to, [first, count](int32_t id) {
      return id >= first && id < first + count ? static_cast<int32_t>(id - first) : -1;
    });
  };
  run_and_record("own_choices", ids.size(0), {ids, out}, run, [](int64_t) {});
  return out;
}

void sum_partials(at::Tensor to, const at::Tensor& partials, const at::Tensor& ids, int64_t experts) {
  check_ids(ids);
  check(to, 2, "to");
  check(partials, 3, "partials");
  const int64_t tokens = ids.size(0), top_k = ids.size(1), ranks = partials.size(1), hidden = partials.size(2);
  TORCH_CHECK(to.scalar_type() == at::kFloat && partials.scalar_type() == at::kFloat, "partials are ", partials.scalar_type(),
              " and go to ", to.scalar_type(), "; use float32");
  TORCH_CHECK(to.size(0) == tokens && partials.size(0) == tokens && to.size(1) == hidden, "partials are ", partials.sizes(),
              " and go to ", to.sizes(), " for ", tokens, " tokens");
  TORCH_CHECK(ranks > 0 && experts > 0 && experts % ranks == 0, experts, " experts do not make equal shards of ", ranks, " ranks");
  const auto run = [=, sums = to.data_ptr<float>(), from = partials.data_ptr<float>(), chosen = ids.data_ptr<int32_t>()](int64_t rows) {
    std::vector<float> space(static_cast<size_t>(num_threads() * ranks * hidden));
    run_tasks(rows, [&](int64_t t, int thread) {
      const int32_t* const own = chosen + t * top_k;
      const auto row_of = [&](int rank) -> const float* {
        const int64_t first = rank * (experts / ranks), last = first + experts / ranks;
        const bool has = std::any_of(own, own + top_k, [=](int32_t id) { return id >= first && id < last; });
        return has ? from + (t * ranks + rank) * hidden : nullptr;
      };
      write_sum_of_ranks(row_of, static_cast<int>(ranks), hidden, space.data() + thread * ranks * hidden, sums + t * hidden);
    });
  };
  run_and_record("sum_partials", tokens, {to, partials, ids}, run, [](int64_t) {});
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("own_choices(Tensor ids, int first, int count) -> Tensor");
  library.def("sum_partials_(Tensor(a!) to, Tensor partials, Tensor ids, int experts) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("own_choices", sgl_batch::own_choices);
  library.impl("sum_partials_", sgl_batch::sum_partials);
}
