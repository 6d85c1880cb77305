// Owns the products and the softmax of latent attention on the compiler's vector types, for one instruction set chosen
// by the including file, see gemm_vector.h; it also defines SGL_BATCH_MLA_TILE.
#pragma once

#include "attention_mla.h"
#include "rows_vector.h"

namespace sgl_batch {
namespace {

constexpr int kTile = SGL_BATCH_MLA_TILE;
static_assert(kLanes <= kMlaMaxLanes && kMlaChunk % kTile == 0);

typedef int32_t VecIU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

inline void begin_tile(VecF (&acc)[kTile], const float* scale, const float* c) {
  if (scale == nullptr) {
    for (int i = 0; i < kTile; ++i) acc[i] = VecF{};
    return;
  }
  const VecF factor = load(scale);
  for (int i = 0; i < kTile; ++i) acc[i] = load(c + i * kLanes) * factor;
}

inline void end_tile(const VecF (&acc)[kTile], float* c) {
  for (int i = 0; i < kTile; ++i) store(c + i * kLanes, acc[i]);
}

struct F32Word {
  using Word = float;
  using Vector = VecF;
  static Vector lanes(const Word* b) { return load(b); }
  static void add(VecF& acc, Word a, Vector b) { acc += b * a; }
};

template <typename Words>
void keys_tile(const void* a, int64_t stride, const void* b, int64_t steps, const float* scale, const void* ahead, float* c) {
  using Word = typename Words::Word;
  const Word* rows = static_cast<const Word*>(a);
  const Word* lanes = static_cast<const Word*>(b);
  const Word* next = static_cast<const Word*>(ahead);
  VecF acc[kTile];
  begin_tile(acc, scale, c);
  for (int64_t step = 0; step < steps; ++step, ++rows, lanes += kLanes) {
    if (next != nullptr) __builtin_prefetch(next + step * kTile, 0, 2);
    const typename Words::Vector right = Words::lanes(lanes);
    const Word* left = rows;
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i, left += stride) Words::add(acc[i], *left, right);
  }
  end_tile(acc, c);
}

template <typename Words>
void values_tile(const void* a, int64_t stride, const void* b, int64_t steps, const float* scale, const void*, float* c) {
  using Word = typename Words::Word;
  const Word* left = static_cast<const Word*>(a);
  const Word* lanes = static_cast<const Word*>(b);
  VecF acc[kTile];
  begin_tile(acc, scale, c);
  for (int64_t step = 0; step < steps; ++step, left += stride, lanes += kLanes) {
    const typename Words::Vector right = Words::lanes(lanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) Words::add(acc[i], left[i], right);
  }
  end_tile(acc, c);
}

// Weights of a chunk, still f32 and in place of the scores; see MlaSoftmaxFn.
inline void softmax_chunk(float* scores, int64_t count, const int32_t* seen, float scaling, float* state, float* kept) {
  const VecI visible = *reinterpret_cast<const VecIU*>(seen);
  const VecF before = load(state);
  VecF maximum = before;
  for (int64_t t = 0; t < count; ++t) {
    const VecF score = load(scores + t * kLanes);
    const VecF larger = score > maximum ? score : maximum;
    maximum = static_cast<int32_t>(t) < visible ? larger : maximum;
  }
  const float factor = scaling * kLog2E;
  VecF sum = {};
  for (int64_t t = 0; t < count; ++t) {
    VecF weight = exp2_clamped((load(scores + t * kLanes) - maximum) * factor);
    weight = static_cast<int32_t>(t) < visible ? weight : VecF{};
    sum += weight;
    store(scores + t * kLanes, weight);
  }
  const VecF shrunk = exp2_clamped((before - maximum) * factor);
  store(state, maximum);
  store(state + kLanes, load(state + kLanes) * shrunk + sum);
  store(kept, shrunk);
}

void softmax_f32(float* scores, int64_t count, const int32_t* seen, float scaling, float* state, float* kept, void*) {
  softmax_chunk(scores, count, seen, scaling, state, kept);
}

}  // namespace
}  // namespace sgl_batch
