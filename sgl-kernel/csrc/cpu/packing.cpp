#include "packing.h"

#include <algorithm>
#include <cstring>

namespace sgl_batch {
namespace {

// A panel of a bf16 matrix is an array of pairs, so that both number types move elements of 4 bytes: a pair of bf16
// along k, or one f32.
template <typename Move>
void each_panel(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch, Move move) {
  const int64_t steps = dtype == DType::kBf16 ? k / 2 : k;
  auto* words = static_cast<uint32_t*>(matrix);
  auto* copy = static_cast<uint32_t*>(scratch);
  for (int64_t first = 0; first < n; first += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, n - first);
    uint32_t* panel = words + first * steps;
    std::memcpy(copy, panel, static_cast<size_t>(width * steps) * 4);
    move(copy, panel, width, steps);
  }
}

}  // namespace

void pack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch) {
  each_panel(matrix, n, k, dtype, scratch, [](const uint32_t* from, uint32_t* to, int64_t width, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t column = 0; column < width; ++column) to[step * width + column] = from[column * steps + step];
  });
}

void unpack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch) {
  each_panel(matrix, n, k, dtype, scratch, [](const uint32_t* from, uint32_t* to, int64_t width, int64_t steps) {
    for (int64_t column = 0; column < width; ++column)
      for (int64_t step = 0; step < steps; ++step) to[column * steps + step] = from[step * width + column];
  });
}

const void* full_panel(const void* packed, int64_t n, int64_t k, int64_t panel, DType dtype, void* scratch) {
  const int64_t steps = dtype == DType::kBf16 ? k / 2 : k;
  const int64_t width = std::min<int64_t>(kPanel, n - panel * kPanel);
  const auto* words = static_cast<const uint32_t*>(packed) + panel * kPanel * steps;
  if (width == kPanel) return words;
  auto* padded = static_cast<uint32_t*>(scratch);
  for (int64_t step = 0; step < steps; ++step) {
    std::memcpy(padded + step * kPanel, words + step * width, static_cast<size_t>(width) * 4);
    std::memset(padded + step * kPanel + width, 0, static_cast<size_t>(kPanel - width) * 4);
  }
  return padded;
}

}  // namespace sgl_batch
