// Owns how operators go through matrices of bf16 beside the same ones whose numbers share scales, panel by panel on all threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <atomic>

#include "gemm.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {

// `plain` [B, N, K], N in whole panels, checked before. Calls each(plain panel, packed panel).
template <typename Each>
void each_grouped_panel(const at::Tensor& plain, const at::Tensor& packed, DType dtype, const Each& each) {
  const int64_t k = plain.size(2);
  auto* numbers = static_cast<uint16_t*>(plain.data_ptr());
  auto* bytes = static_cast<uint8_t*>(packed.data_ptr());
  run_tasks(plain.size(0) * plain.size(1) / kPanel, [&](int64_t panel, int) {
    const int64_t first = panel * kPanel * k;
    each(numbers + first, bytes + packed_bytes(dtype, first));
  });
}

// pack(plain panel, packed panel) returns whether the numbers have the form. Returns whether those of all panels have it.
template <typename Pack>
bool pack_groups(const at::Tensor& plain, const at::Tensor& packed, DType dtype, const Pack& pack) {
  std::atomic<bool> fits = true;
  each_grouped_panel(plain, packed, dtype, [&](const uint16_t* numbers, uint8_t* panel) {
    if (fits.load(std::memory_order_relaxed) && !pack(numbers, panel)) fits.store(false, std::memory_order_relaxed);
  });
  return fits;
}

// A form whose groups of several sizes have a word each beside them, of which the size of a packed tensor tells the group.
struct ScaledForm {
  const char* name;
  int64_t block_k;  // of which groups have whole ones
  DType (*dtype_of)(const at::Tensor& packed, int64_t k, const char* name);
  int64_t (*group_of)(DType dtype);
  bool (*pack_panel)(const uint16_t* plain, int64_t k, int64_t group, void* to);
  void (*unpack_panel)(const void* panel, int64_t k, int64_t group, uint16_t* plain);

  // [B, N, K] of bf16 beside a packed tensor; returns their number type.
  DType check_both(const at::Tensor& plain, const at::Tensor& packed) const {
    check(plain, 3, "weight");
    check(packed, 3, "packed");
    const int64_t n = plain.size(1), k = plain.size(2);
    TORCH_CHECK(plain.scalar_type() == at::kBFloat16 && n > 0 && k > 0 && n % kPanel == 0 && k % block_k == 0, "weight is ",
                plain.scalar_type(), plain.sizes(), "; ", name, " takes bfloat16 of multiples of ", kPanel, " outputs and ", block_k,
                " inputs");
    const DType dtype = dtype_of(packed, k, "packed");
    TORCH_CHECK(packed.size(0) == plain.size(0) && packed.size(1) == n, "packed is ", packed.sizes(), " for a weight ", plain.sizes());
    return dtype;
  }

  bool pack(const at::Tensor& weight, const at::Tensor& packed) const {
    const DType dtype = check_both(weight, packed);
    return pack_groups(weight, packed, dtype, [&, k = weight.size(2), group = group_of(dtype)](const uint16_t* plain, void* panel) {
      return pack_panel(plain, k, group, panel);
    });
  }

  at::Tensor unpack(const at::Tensor& packed, int64_t k) const {
    check(packed, 3, "packed");
    auto plain = at::empty({packed.size(0), packed.size(1), k}, packed.options().dtype(at::kBFloat16));
    const DType dtype = check_both(plain, packed);
    each_grouped_panel(plain, packed, dtype, [&, group = group_of(dtype)](uint16_t* numbers, const void* panel) {
      unpack_panel(panel, k, group, numbers);
    });
    return plain;
  }
};

}  // namespace sgl_batch
