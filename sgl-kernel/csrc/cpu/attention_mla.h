// Owns latent attention (MLA) over pages: prefill pieces with a cached prefix and decode rows alike, in the latent's
// space. Which instruction set computes its products is isa.cpp's choice.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// A page holds `page` tokens, each one row of `dim` numbers that all heads share: keys are whole rows, values are their
// first `value_dim` numbers. Pieces, their lengths and tables are as in attention.h. bf16 needs even dims.
struct MlaCall {
  int64_t pieces, heads, dim, value_dim, page;
  const void* q;  // [rows, heads * dim]
  int64_t q_stride;
  const void* pages;
  DType dtype;
  const int64_t* starts;        // [pieces + 1]
  const int64_t* lengths;       // [pieces]
  const int64_t* table_starts;  // [pieces]
  const int64_t* tables;
  float scaling;  // above 0
  void* out;  // [rows, heads * value_dim]
};

// A row (a token's head) is computed over kMlaChunk tokens at a time, from the first, with a running maximum and sum:
// its result depends neither on the rows beside it, nor on threads, nor on the size of pages.
void run_mla(const MlaCall& call);

constexpr int kMlaChunk = 64;

// What one instruction set computes of it. Rows of queries lie in the lanes of a vector, so that nothing is ever added
// up across lanes. A word is one f32, or a pair of bf16 of which the first stands in the low half.
//
// Tile: c[tile][lanes] = c * scale (0 where scale is null) + the sum over `steps` of a[i][step] * b[step][lanes]
//   keys:   a[i] begins `stride` words after a[i - 1] and goes on word by word: a tile of tokens
//   values: a[i] is word i, and each step is `stride` words further: a tile of channels
// Meanwhile as many words from `ahead` on are brought into the cache as the tile reads, where it is not null.
using MlaTileFn = void (*)(const void* a, int64_t stride, const void* b, int64_t steps, const float* scale, const void* ahead,
                           float* c);
// One chunk of softmax: scores[count][lanes] of tokens become weights, zero where a lane sees fewer than t + 1 tokens.
// `state` holds maxima of scores [lanes] and sums of weights [lanes]; `kept` becomes the factor by which what was added up before must shrink.
// `weights` become words, [count][lanes] of f32 or [count / 2, rounded up][lanes] of pairs; they may be the scores.
using MlaSoftmaxFn = void (*)(float* scores, int64_t count, const int32_t* seen, float scaling, float* state, float* kept,
                              void* weights);
// out[i] = the pair a[i], b[i]; b is null for zeros.
using MlaInterleaveFn = void (*)(const uint16_t* a, const uint16_t* b, int64_t count, uint32_t* out);

// Rows of one vector of lanes into lanes, word by word, and sums of lanes times a factor each into rows, channel by channel
// (a multiple of the lanes). Words or channels of the lanes lie `stride` lanes apart, rows `row_stride` floats.
using MlaPackFn = void (*)(const uint32_t* const* rows, int64_t words, uint32_t* lanes, int64_t stride);
using MlaUnpackFn = void (*)(const float* lanes, int64_t stride, const float* factors, int64_t channels, float* rows,
                             int64_t row_stride);

// The kernels for blocks of rows of one width.
struct MlaWidth {
  int lanes, tile;  // tile divides kMlaChunk
  MlaTileFn keys_f32, values_f32;
  MlaSoftmaxFn softmax_f32;
  MlaTileFn keys_pairs, values_pairs;  // null where bf16 is widened
  MlaSoftmaxFn softmax_pairs;
};

struct MlaKernels {
  MlaWidth narrow, wide;  // of one vector, and of two, which read each a once for both
  MlaPackFn pack;
  MlaUnpackFn unpack;
  MlaInterleaveFn interleave;  // null where bf16 is widened
};

constexpr int kMlaMaxLanes = 32;

extern const MlaKernels kMlaPortable;
#if defined(__x86_64__)
extern const MlaKernels kMlaAvx2;
extern const MlaKernels kMlaAvx512;
extern const MlaKernels kMlaAvx512Bf16;
#endif

}  // namespace sgl_batch
