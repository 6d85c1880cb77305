// Owns where scales lie that blocks of a matrix's numbers share.
#pragma once

#include <cstdint>

namespace sgl_batch {

// Blocks of `rows` x `columns` numbers share a scale; `across` blocks lie side by side.
struct BlockScales {
  const float* first;
  int64_t rows, columns, across;

  float of(int64_t row, int64_t column) const { return first[row / rows * across + column / columns]; }
};

}  // namespace sgl_batch
