// Owns the loader of experts as torch sees it: a class of sgl_batch_kernel. Nothing is decided here.
// GCC 12 takes the reference counts in torch's own headers for memory of no size.
#pragma GCC diagnostic ignored "-Wstringop-overflow"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "../cpu/tensor_checks.h"
#include "expert_loader.h"

namespace sgl_batch {
namespace {

using Numbers = std::vector<int64_t>;

// What a caller did wrong is a ValueError, what the system refused a RuntimeError.
template <typename Call>
auto guarded(const Call& call) {
  try {
    return call();
  } catch (const std::invalid_argument& fault) {
    TORCH_CHECK_VALUE(false, fault.what());
  }
}

Numbers numbers_in(const at::Tensor& tensor, const char* name) {
  check_index(tensor, name);
  const auto* begin = tensor.data_ptr<int64_t>();
  return {begin, begin + tensor.numel()};
}

class Loader : public torch::CustomClassHolder {
 public:
  // `w13` [S, 2I, M] and `w2` [S, M, I] are written to until `close`; the caller keeps them and the scales alive.
  // Those of 4 and 8 bits that share scales have other rows. `transposed`: as in ExpertSlots; `stored_scales`: as in StoredScales.
  // `four_bits`: as in FourBitNumbers, its members one after the other; empty for others.
  Loader(const std::vector<std::string>& files, bool direct, bool keeps_cached, const at::Tensor& w13, const at::Tensor& w2,
         const std::optional<at::Tensor>& w13_scales, const std::optional<at::Tensor>& w2_scales, bool stored_f32,
         bool transposed, int64_t num_threads, const std::optional<at::Tensor>& stored_scales, int64_t block_rows,
         int64_t block_columns, const Numbers& four_bits) {
    check(w13, 3, "w13");
    check(w2, 3, "w2");
    bytes_ = w13.scalar_type() == at::kFloat8_e4m3fn || w13.scalar_type() == at::kShort;
    four_bits_ = w13.scalar_type() == at::kInt || w13.scalar_type() == at::kByte;
    const bool grouped = bytes_ || four_bits_;
    const int64_t slots = w2.size(0), hidden = w2.size(1), inter = grouped ? w13.size(1) / 2 : w2.size(2);
    TORCH_CHECK_VALUE(w13.size(0) == slots && w13.size(1) == 2 * inter && (grouped || w13.size(2) == hidden), "w13 is ",
                      w13.sizes(), " beside w2 of ", w2.sizes());
    TORCH_CHECK_VALUE(w13.scalar_type() == w2.scalar_type(), "w13 is ", w13.scalar_type(), " but w2 is ", w2.scalar_type());
    TORCH_CHECK_VALUE(num_threads > 0, "a loader of ", num_threads, " threads");
    const DType stored = stored_f32 ? DType::kF32 : DType::kBf16;
    const DType dtype = grouped ? expert_dtype_of(w13, hidden, w2, inter) : weight_dtype_of(w13, "w13");
    TORCH_CHECK_VALUE(grouped || dtype == stored || dtype == DType::kI8, "weights of ", w13.scalar_type(),
                      " are not made from those of another number type");
    TORCH_CHECK_VALUE(dtype == DType::kF32 || (hidden % 2 == 0 && inter % 2 == 0), "experts of ", inter, " channels and ",
                      hidden, " inputs; packing needs even numbers");
    const auto* w13_own = scales_of(w13, w13_scales, slots * 2 * inter, "w13");
    const auto* w2_own = scales_of(w2, w2_scales, slots * hidden, "w2");
    const ExpertSlots made{slots,
                           hidden,
                           inter,
                           stored,
                           dtype,
                           transposed,
                           static_cast<char*>(w13.data_ptr()),
                           static_cast<char*>(w2.data_ptr()),
                           const_cast<float*>(w13_own),
                           const_cast<float*>(w2_own),
                           scales_in_files(stored_scales, block_rows, block_columns, dtype),
                           four_bits_in_files(four_bits, dtype, hidden, inter)};
    loader_ = guarded([&] { return std::make_unique<ExpertLoader>(files, direct, keeps_cached, made, static_cast<int>(num_threads)); });
  }

  void submit(const at::Tensor& slots, const at::Tensor& places, bool urgent) {
    const Numbers which = numbers_in(slots, "slots");
    check(places, 3, "places");
    const int64_t numbers = bytes_ ? 3 : four_bits_ ? 6 : 2;
    TORCH_CHECK_VALUE(places.scalar_type() == at::kLong && places.size(0) == slots.size(0) && places.size(1) == 3 &&
                          places.size(2) == numbers,
                      "places are ", places.scalar_type(), places.sizes(), "; use int64 [", slots.size(0), ", 3, ", numbers, "]");
    std::vector<ExpertPlaces> experts(which.size());
    const auto* next = places.data_ptr<int64_t>();
    for (ExpertPlaces& expert : experts)
      for (MatrixPlace& place : expert) {
        place = {{next[0], next[1]}, bytes_ ? next[2] : 0};
        if (four_bits_) place.scales = {next[2], next[3]}, place.zeros = {next[4], next[5]};
        next += numbers;
      }
    guarded([&] { loader_->submit(which, experts, urgent); });
  }

  void hurry(const at::Tensor& slots) {
    guarded([&] { loader_->hurry(numbers_in(slots, "slots")); });
  }

  at::Tensor drop(const at::Tensor& slots) {
    const auto dropped = guarded([&] { return loader_->drop(numbers_in(slots, "slots")); });
    auto answer = at::empty({static_cast<int64_t>(dropped.size())}, at::kBool);
    std::copy(dropped.begin(), dropped.end(), answer.data_ptr<bool>());
    return answer;
  }

  void wait(const at::Tensor& slots) {
    guarded([&] { loader_->wait(numbers_in(slots, "slots")); });
  }

  bool direct() { return loader_->direct(); }
  void close() { loader_->close(); }

  Numbers totals() {
    const LoaderTotals t = loader_->totals();
    return {t.bytes, t.experts, t.dropped, t.errors, t.read_ns, t.pack_ns, t.wait_ns};
  }

 private:
  StoredScales scales_in_files(const std::optional<at::Tensor>& scales, int64_t rows, int64_t columns, DType dtype) const {
    TORCH_CHECK_VALUE(bytes_ == scales.has_value(), "weights in files ", bytes_ ? "of bytes need" : "of other types have no", " scales");
    if (!bytes_) return {};
    check(*scales, 1, "stored_scales");
    const int64_t group = byte_group(dtype);
    TORCH_CHECK_VALUE(scales->scalar_type() == at::kFloat && rows >= 0 && columns >= 0 && columns % group == 0, "stored_scales are ",
                      scales->scalar_type(), " of blocks of ", rows, " x ", columns, "; use float32, and multiples of ", group, " columns");
    return {scales->data_ptr<float>(), scales->numel(), rows, columns};
  }

  FourBitNumbers four_bits_in_files(const Numbers& members, DType dtype, int64_t hidden, int64_t inter) const {
    TORCH_CHECK_VALUE(four_bits_ != members.empty(), "numbers of four bits in files are those of slots of them, and of no others");
    if (!four_bits_) return {};
    const int64_t least = dtype == DType::kFp4 ? 3 : 0, most = dtype == DType::kFp4 ? 3 : 2;
    TORCH_CHECK_VALUE(members.size() == 5 && members[0] >= least && members[0] <= most, "four_bits is ", members,
                      "; use layout, group, whether scales are bf16, whether there are zero points, what these lack");
    const int64_t group = members[1], own = dtype == DType::kFp4 ? kFp4BlockK : int4_group(dtype);
    const bool whole = group == 0 || (group > 0 && group % own == 0 && hidden % group == 0 && inter % group == 0);
    TORCH_CHECK_VALUE(whole, "groups of ", group, " in files for ", hidden, " and ", inter, " inputs; use multiples of ", own);
    return {static_cast<FourBitLayout>(members[0]), group, members[2] != 0, members[3] != 0, members[4]};
  }

  bool bytes_ = false, four_bits_ = false;
  std::unique_ptr<ExpertLoader> loader_;
};

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  using sgl_batch::Loader;
  library.class_<Loader>("ExpertLoader")
      .def(torch::init<const std::vector<std::string>&, bool, bool, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, bool, bool, int64_t,
                       const std::optional<at::Tensor>&, int64_t, int64_t, const std::vector<int64_t>&>())
      .def("submit", &Loader::submit)
      .def("hurry", &Loader::hurry)
      .def("drop", &Loader::drop)
      .def("wait", &Loader::wait)
      .def("direct", &Loader::direct)
      .def("close", &Loader::close)
      .def("totals", &Loader::totals);
}
