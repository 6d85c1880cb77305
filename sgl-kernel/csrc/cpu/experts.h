// Owns expert compute over a combined batch: which rows meet which expert, in which tasks, added up in which order.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// T tokens of `hidden` numbers, each with `top_k` choices among `experts` experts of `inter` intermediate channels.
// w13: per expert the packed gate matrix [inter, hidden], then the packed up matrix; w2: packed [hidden, inter]. Those of
// int8 have a scale for each output: [experts, 2 * inter] and [experts, hidden].
// A choice with a negative id belongs to nobody here and counts as nothing.
// `slots`: where each expert lies in w13 and w2, as its number there, or -1 for one that is not there and has no rows; or
// null where they lie in their own order.
// `part`: both products, or one of them, of which the other has other columns. The rows between them then lie at `between`
// [T * top_k, inter], by expert and then by token: the first product writes them, `inter` rounded up to whole panels; the
// second one reads them.
// `clamped`: what lies between the products in place of SiLU(gate) * up, see ClampedMulFn. Biases are added to products.
enum class ExpertsPart { kBoth, kUp, kDown };

struct ExpertsCall {
  int64_t tokens, top_k, hidden, inter, experts;
  const void* x;
  int64_t x_stride;  // elements from row to row
  DType x_dtype;
  const void* w13;
  const void* w2;
  DType w_dtype;
  const float* w13_scales;
  const float* w2_scales;
  const float* topk_weights;  // [T, top_k]
  const int32_t* topk_ids;    // [T, top_k]
  void* out;                  // [T, hidden]
  DType out_dtype;
  int64_t* rows_per_expert;  // [experts]
  const int32_t* slots;      // [experts], or null
  const float* w13_bias;     // [experts, 2 * inter], gates first; or null
  const float* w2_bias;      // [experts, hidden], or null
  bool clamped;
  float alpha, limit;
  ExpertsPart part = ExpertsPart::kBoth;
  void* between = nullptr;
  int64_t between_stride = 0;  // bytes from row to row
  const uint8_t* w13_marks = nullptr;  // [experts, 2, panels of inter], or null where no panel is coded
  const uint8_t* w2_marks = nullptr;   // [experts, panels of hidden], or null
};

// out[t] = sum over choices of weight * down(silu(gate(x[t])) * up(x[t])), each product plus its bias.
//
// The choices of a token are added up in f32 in the order of a binary tree over expert ids that halves [0, experts)
// recursively (the middle one of an odd number belongs to the first half). So the sum depends on nothing but the token's own choices; and where experts lie on a power-of-two
// number of ranks in equal contiguous shards, the ranks' sums added up in the same tree are the same bits.
void run_experts(const ExpertsCall& call);

}  // namespace sgl_batch
