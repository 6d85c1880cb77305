// Owns packing matrices of a file that lie transposed there, with a row for each input: their columns are outputs.
#pragma once

#include <cstdint>

#include "../cpu/gemm.h"

namespace sgl_batch {

// Of rows of `stride` numbers, the columns first, first + step and so on: the outputs of a matrix [outputs, inputs].
struct Columns {
  int64_t stride, first, step, outputs, inputs;
};

// Of those rows [begin, begin + rows) lie at `plain`. Their numbers go to where a packed matrix of the same type has
// them; bf16 is packed in pairs of inputs, and wants an even `begin` and even `rows`.
void pack_columns(const void* plain, DType dtype, const Columns& columns, int64_t begin, int64_t rows, void* packed);

// Likewise to where a plain matrix [outputs, inputs] has them.
void transpose_columns(const void* plain, DType dtype, const Columns& columns, int64_t begin, int64_t rows, void* matrix);

}  // namespace sgl_batch
