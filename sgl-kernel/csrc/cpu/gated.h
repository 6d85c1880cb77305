// Owns the first half of an MLP: SiLU(gate) * up, for some of its intermediate channels.
#pragma once

#include <cstdint>

#include "packing.h"

namespace sgl_batch {

// out[row, 0:last - first] = silu(gate(x[row])) * up(x[row]), channels [first, last) of w13's `inter`. w13 is the packed
// gate matrix [inter, hidden], then the packed up matrix. `first` begins a panel; `last` ends one, or is `inter`. out has
// the number type in which rows meet the weight: what an expert's down product gets, so that it has an expert's bits.
struct GatedCall {
  int64_t rows, hidden, inter, first, last;
  const void* x;  // [rows, hidden]
  DType x_dtype;
  const void* w13;
  DType w_dtype;
  const float* scales;  // [2 * inter], or null
  void* out;
};

void run_gated(const GatedCall& call);

}  // namespace sgl_batch
