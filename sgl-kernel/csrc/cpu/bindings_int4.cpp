// Owns the operators in int4 as torch sees them: shapes and number types are checked here, nothing is computed.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "grouped_panels.h"
#include "int4.h"

namespace sgl_batch {
namespace {

constexpr ScaledForm kInt4{.name = "int4",
                           .block_k = kInt4BlockK,
                           .dtype_of = int4_dtype_of,
                           .group_of = int4_group,
                           .pack_panel = pack_int4_panel,
                           .unpack_panel = unpack_int4_panel};

bool pack_int4(const at::Tensor& weight, at::Tensor packed) { return kInt4.pack(weight, packed); }
at::Tensor unpack_int4(const at::Tensor& packed, int64_t k) { return kInt4.unpack(packed, k); }

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("pack_int4_(Tensor weight, Tensor(a!) packed) -> bool");
  library.def("unpack_int4(Tensor packed, int inputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_int4_", sgl_batch::pack_int4);
  library.impl("unpack_int4", sgl_batch::unpack_int4);
}
