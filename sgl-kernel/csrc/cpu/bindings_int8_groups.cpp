// Owns the operators of integers of eight bits in groups as torch sees them: shapes and number types are checked here, nothing is
// computed.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "grouped_panels.h"
#include "int8_groups.h"

namespace sgl_batch {
namespace {

constexpr ScaledForm kInt8{.name = "int8 in groups",
                           .block_k = kInt8BlockK,
                           .dtype_of = int8_groups_dtype_of,
                           .group_of = int8_group,
                           .pack_panel = pack_int8_panel,
                           .unpack_panel = unpack_int8_panel};

bool pack_int8_groups(const at::Tensor& weight, at::Tensor packed) { return kInt8.pack(weight, packed); }
at::Tensor unpack_int8_groups(const at::Tensor& packed, int64_t k) { return kInt8.unpack(packed, k); }

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("pack_int8_groups_(Tensor weight, Tensor(a!) packed) -> bool");
  library.def("unpack_int8_groups(Tensor packed, int inputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_int8_groups_", sgl_batch::pack_int8_groups);
  library.impl("unpack_int8_groups", sgl_batch::unpack_int8_groups);
}
