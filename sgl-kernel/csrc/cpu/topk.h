// Owns the choice of experts from a router's logits: which rows go to which thread. How a row is chosen from is
// topk_vector.h's, for each instruction set.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// For each row the experts that rank highest among those of its best groups: their ids, best first, and scores. Equal
// ranks go to the lower id, and so do groups; NaN ranks above all numbers.
struct TopKCall {
  int64_t rows;
  const void* logits;  // [rows, experts]
  int64_t stride;      // elements from row to row
  DType dtype;
  TopKRule rule;
  float* weights;  // [rows, top_k]
  int32_t* ids;    // [rows, top_k]
};

void run_topk(const TopKCall& call);

}  // namespace sgl_batch
