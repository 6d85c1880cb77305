// Owns expert compute in int8 over a combined batch. What it computes, and in which order it adds up, is as in experts.h,
// with rows rounded to int8 before each of the two products.
#pragma once

#include "experts.h"

namespace sgl_batch {

// w13 and w2 are int8, packed as gemm_int8.h has it. Both parts, and experts in their own order: no slots.
void run_experts_int8(const ExpertsCall& call);

}  // namespace sgl_batch
