// Owns the operator of copies past the caches as torch sees it; nothing is copied here.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "copy_past_caches.h"

namespace sgl_batch {
namespace {

void copy(at::Tensor to, const at::Tensor& source) {
  TORCH_CHECK(to.scalar_type() == source.scalar_type() && to.sizes() == source.sizes(), "source is ", source.scalar_type(),
              source.sizes(), " and to is ", to.scalar_type(), to.sizes(), "; a copy has the same number type and shape");
  TORCH_CHECK(to.is_contiguous() && source.is_contiguous(), "a copy past the caches takes contiguous tensors");
  copy_past_caches(source.data_ptr(), to.data_ptr(), static_cast<int64_t>(source.nbytes()));
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) { library.def("copy_past_caches_(Tensor(a!) to, Tensor source) -> ()"); }
TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) { library.impl("copy_past_caches_", sgl_batch::copy); }
