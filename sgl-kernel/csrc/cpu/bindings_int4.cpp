// Owns the operators in int4 as torch sees them: shapes and number types are checked here, nothing is computed.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "grouped_panels.h"
#include "int4.h"

namespace sgl_batch {
namespace {

constexpr int64_t kWordIntegers = 8;

constexpr ScaledForm kInt4{.name = "int4",
                           .block_k = kInt4BlockK,
                           .dtype_of = int4_dtype_of,
                           .group_of = int4_group,
                           .pack_panel = pack_int4_panel,
                           .unpack_panel = unpack_int4_panel};

bool pack_int4(const at::Tensor& weight, at::Tensor packed) { return kInt4.pack(weight, packed); }
at::Tensor unpack_int4(const at::Tensor& packed, int64_t k) { return kInt4.unpack(packed, k); }

// Words of eight integers of four bits, in any strides, or one integer a byte.
void widen_integers(const at::Tensor& integers, const at::Tensor& lacks, const at::Tensor& scales, at::Tensor out) {
  check(lacks, 2, "lacks");
  check(scales, 2, "scales");
  check(out, 2, "out");
  const int64_t rows = out.size(0), k = out.size(1), across = scales.size(1);
  const bool in_words = integers.scalar_type() == at::kInt, has_sign = integers.scalar_type() == at::kChar;
  const bool in_bytes = (has_sign || integers.scalar_type() == at::kByte) && integers.is_contiguous();
  TORCH_CHECK(integers.dim() == 2 && (in_words || in_bytes) &&
                  integers.size(0) == rows && integers.size(1) * (in_words ? kWordIntegers : 1) == k,
              "integers are ", integers.scalar_type(), integers.sizes(), " for ", out.sizes(), "; use int32 [", rows, ", ", k, " / ",
              kWordIntegers, "] or contiguous uint8 or int8 [", rows, ", ", k, "]");
  TORCH_CHECK(out.scalar_type() == at::kBFloat16 && across > 0 && k % (2 * across) == 0, "out is ", out.scalar_type(), out.sizes(),
              "; use bfloat16 of ", across, " groups of an even size");
  for (const auto& [tensor, name] : {std::pair(lacks, "lacks"), std::pair(scales, "scales")})
    TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.sizes() == at::IntArrayRef({rows, across}), name, " are ",
                tensor.scalar_type(), tensor.sizes(), "; use float32 [", rows, ", ", across, "]");
  const auto *of_lacks = lacks.data_ptr<float>(), *of_scales = scales.data_ptr<float>();
  auto* to = static_cast<uint16_t*>(out.data_ptr());
  run_tasks(divide_up(rows, kPanel), [&](int64_t task, int) {
    std::vector<uint32_t> words(in_words ? static_cast<size_t>(integers.size(1)) : 0);
    for (int64_t row = task * kPanel; row < std::min((task + 1) * kPanel, rows); ++row) {
      const WideGroups groups{of_lacks + row * across, of_scales + row * across, k / across};
      if (!in_words) {
        const auto* bytes = static_cast<const uint8_t*>(integers.data_ptr()) + row * k;
        if (has_sign)
          widen_byte_row(reinterpret_cast<const int8_t*>(bytes), groups, k, to + row * k);
        else
          widen_byte_row(bytes, groups, k, to + row * k);
        continue;
      }
      const auto* from = static_cast<const uint32_t*>(integers.data_ptr()) + row * integers.stride(0);
      for (size_t i = 0; i < words.size(); ++i) words[i] = from[static_cast<int64_t>(i) * integers.stride(1)];
      widen_nibble_row(reinterpret_cast<const uint8_t*>(words.data()), groups, k, to + row * k);
    }
  });
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("pack_int4_(Tensor weight, Tensor(a!) packed) -> bool");
  library.def("unpack_int4(Tensor packed, int inputs) -> Tensor");
  library.def("widen_integers_(Tensor integers, Tensor lacks, Tensor scales, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("pack_int4_", sgl_batch::pack_int4);
  library.impl("unpack_int4", sgl_batch::unpack_int4);
  library.impl("widen_integers_", sgl_batch::widen_integers);
}
