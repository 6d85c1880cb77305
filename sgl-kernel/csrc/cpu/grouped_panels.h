// Owns how operators go through matrices of bf16 beside the same ones of numbers that share scales, panel by panel on all threads. The tensors are
// checked before.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>

#include "gemm.h"
#include "tasks.h"

namespace sgl_batch {

// `plain` [B, N, K], N in whole panels. Calls each(plain panel, packed panel).
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

}  // namespace sgl_batch
