// Owns the small operators between a pass's large ones, as calls that a record can have. ATen computes them: each row by itself,
// with the bits that it gives otherwise.
#include <ATen/core/Tensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ScalarOps.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>
#include <torch/library.h>

#include <optional>

#include "record.h"

namespace sgl_batch {
namespace {

// Calls compute(the first rows of `out`, first), now with all rows; first(tensor) gives those rows of an operand that has as
// many as `out`, and others whole.
// `compute` keeps its operands, and so their memory.
template <typename Compute>
at::Tensor by_rows(const char* name, const at::Tensor& out, const Compute& compute) {
  TORCH_CHECK(out.dim() > 0, name, " takes rows; its operands have no dimensions");
  const auto run = [out, compute](int64_t rows) {
    at::Tensor part = out.narrow(0, 0, rows);
    compute(part, [&](const at::Tensor& whole) {
      return whole.dim() == out.dim() && whole.size(0) == out.size(0) ? whole.narrow(0, 0, rows) : whole;
    });
  };
  run_and_record(name, out.size(0), {}, run, [](int64_t) {});
  return out;
}

at::Tensor room_for_both(const at::Tensor& a, const at::Tensor& b) {
  return at::empty(at::infer_size(a.sizes(), b.sizes()), a.options().dtype(at::result_type(a, b)));
}

at::Tensor copy_rows(const at::Tensor& x, std::optional<at::ScalarType> dtype) {
  const auto out = at::empty(x.sizes(), x.options().dtype(dtype.value_or(x.scalar_type())));
  return by_rows("copy_rows", out, [x](at::Tensor& part, const auto& first) { part.copy_(first(x)); });
}

void put_rows(at::Tensor to, const at::Tensor& x) {
  TORCH_CHECK(to.sizes() == x.sizes(), "x is ", x.sizes(), " and goes to ", to.sizes());
  by_rows("put_rows", to, [x](at::Tensor& part, const auto& first) { part.copy_(first(x)); });
}

at::Tensor add_rows(const at::Tensor& a, const at::Tensor& b) {
  return by_rows("add_rows", room_for_both(a, b),
                 [a, b](at::Tensor& part, const auto& first) { at::add_out(part, first(a), first(b)); });
}

at::Tensor mul_rows(const at::Tensor& a, const at::Tensor& b) {
  return by_rows("mul_rows", room_for_both(a, b),
                 [a, b](at::Tensor& part, const auto& first) { at::mul_out(part, first(a), first(b)); });
}

at::Tensor scale_rows(const at::Tensor& x, double factor) {
  at::Tensor number = c10::scalar_to_tensor(factor);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);  // it has no number type of its own
  return by_rows("scale_rows", room_for_both(x, number),
                 [x, number](at::Tensor& part, const auto& first) { at::mul_out(part, first(x), number); });
}

at::Tensor sigmoid_rows(const at::Tensor& x) {
  TORCH_CHECK(x.is_floating_point(), "x is ", x.scalar_type(), "; use floats");
  return by_rows("sigmoid_rows", at::empty(x.sizes(), x.options()),
                 [x](at::Tensor& part, const auto& first) { at::sigmoid_out(part, first(x)); });
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("copy_rows(Tensor x, ScalarType? dtype) -> Tensor");
  library.def("put_rows_(Tensor(a!) to, Tensor x) -> ()");
  library.def("add_rows(Tensor a, Tensor b) -> Tensor");
  library.def("mul_rows(Tensor a, Tensor b) -> Tensor");
  library.def("scale_rows(Tensor x, float factor) -> Tensor");
  library.def("sigmoid_rows(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("copy_rows", sgl_batch::copy_rows);
  library.impl("put_rows_", sgl_batch::put_rows);
  library.impl("add_rows", sgl_batch::add_rows);
  library.impl("mul_rows", sgl_batch::mul_rows);
  library.impl("scale_rows", sgl_batch::scale_rows);
  library.impl("sigmoid_rows", sgl_batch::sigmoid_rows);
}
