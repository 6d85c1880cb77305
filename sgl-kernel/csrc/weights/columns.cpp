// Owns packing transposed matrices: see columns.h.
#include "columns.h"

#include <algorithm>

namespace sgl_batch {
namespace {

constexpr int64_t kColumnsAtOnce = 16;  // of a transposition: what is written of each output stays in the caches

// `Pair` inputs of an output lie side by side in a panel.
template <typename Number, int64_t Pair>
void pack(const Number* plain, const Columns& c, int64_t begin, int64_t rows, Number* packed) {
  for (int64_t row = 0; row < rows; row += Pair)
    for (int64_t output = 0; output < c.outputs; output += kPanel) {
      const int64_t width = std::min<int64_t>(kPanel, c.outputs - output);
      const Number* from = plain + row * c.stride + c.first + output * c.step;
      Number* to = packed + output * c.inputs + (begin + row) * width;
      for (int64_t column = 0; column < width; ++column)
        for (int64_t input = 0; input < Pair; ++input) to[column * Pair + input] = from[input * c.stride + column * c.step];
    }
}

template <typename Number>
void transpose(const Number* plain, const Columns& c, int64_t begin, int64_t rows, Number* matrix) {
  for (int64_t first = 0; first < c.outputs; first += kColumnsAtOnce) {
    const int64_t last = std::min(first + kColumnsAtOnce, c.outputs);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t output = first; output < last; ++output)
        matrix[output * c.inputs + begin + row] = plain[row * c.stride + c.first + output * c.step];
  }
}

}  // namespace

void pack_columns(const void* plain, DType dtype, const Columns& columns, int64_t begin, int64_t rows, void* packed) {
  if (dtype == DType::kF32)
    pack<uint32_t, 1>(static_cast<const uint32_t*>(plain), columns, begin, rows, static_cast<uint32_t*>(packed));
  else
    pack<uint16_t, 2>(static_cast<const uint16_t*>(plain), columns, begin, rows, static_cast<uint16_t*>(packed));
}

void transpose_columns(const void* plain, DType dtype, const Columns& columns, int64_t begin, int64_t rows, void* matrix) {
  if (dtype == DType::kF32)
    transpose(static_cast<const uint32_t*>(plain), columns, begin, rows, static_cast<uint32_t*>(matrix));
  else
    transpose(static_cast<const uint16_t*>(plain), columns, begin, rows, static_cast<uint16_t*>(matrix));
}

}  // namespace sgl_batch
