// Owns the products and the softmax of latent attention on the compiler's vector types, for one instruction set chosen
// by the including file, see gemm_vector.h; it also defines SGL_BATCH_MLA_TILE.
#pragma once

#include "attention_mla.h"
#include "rows_vector.h"

namespace sgl_batch {
namespace {

// V vectors of lanes side by side, and the rows of a tile for which the registers suffice.
template <int V>
struct Width {
  static constexpr int kTile = SGL_BATCH_MLA_TILE / V;
  static constexpr int kWide = V * kLanes;
  static_assert(kWide <= kMlaMaxLanes && kMlaChunk % kTile == 0);

  VecF acc[kTile][V];

  Width(const float* scale, const float* c) {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v)
        acc[i][v] = scale == nullptr ? VecF{} : load(c + i * kWide + v * kLanes) * load(scale + v * kLanes);
  }
  void put(float* c) const {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) store(c + i * kWide + v * kLanes, acc[i][v]);
  }
};

struct F32Word {
  using Word = float;
  using Vector = VecF;
  static Vector lanes(const Word* b) { return load(b); }
  static Vector splat_word(Word a) { return splat(a); }
  static void add(VecF& acc, Vector a, Vector b) { acc += a * b; }
};

template <typename Words, int V>
void keys_tile(const void* a, int64_t stride, const void* b, int64_t steps, const float* scale, const void* ahead, float* c) {
  using Word = typename Words::Word;
  const Word* rows = static_cast<const Word*>(a);
  const Word* lanes = static_cast<const Word*>(b);
  const Word* next = static_cast<const Word*>(ahead);
  Width<V> sums(scale, c);
  for (int64_t step = 0; step < steps; ++step, ++rows, lanes += sums.kWide) {
    if (next != nullptr) __builtin_prefetch(next + step * sums.kTile, 0, 2);
    typename Words::Vector right[V];
    for (int v = 0; v < V; ++v) right[v] = Words::lanes(lanes + v * kLanes);
    const Word* left = rows;
#pragma GCC unroll 16
    for (int i = 0; i < sums.kTile; ++i, left += stride) {
      const typename Words::Vector word = Words::splat_word(*left);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) Words::add(sums.acc[i][v], word, right[v]);
    }
  }
  sums.put(c);
}

template <typename Words, int V>
void values_tile(const void* a, int64_t stride, const void* b, int64_t steps, const float* scale, const void*, float* c) {
  using Word = typename Words::Word;
  const Word* left = static_cast<const Word*>(a);
  const Word* lanes = static_cast<const Word*>(b);
  Width<V> sums(scale, c);
  for (int64_t step = 0; step < steps; ++step, left += stride, lanes += sums.kWide) {
    typename Words::Vector right[V];
    for (int v = 0; v < V; ++v) right[v] = Words::lanes(lanes + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < sums.kTile; ++i) {
      const typename Words::Vector word = Words::splat_word(left[i]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) Words::add(sums.acc[i][v], word, right[v]);
    }
  }
  sums.put(c);
}

// Weights of a chunk, still f32 and in place of the scores; see MlaSoftmaxFn.
template <int V>
inline void softmax_chunk(float* scores, int64_t count, const int32_t* seen, float scaling, float* state, float* kept) {
  constexpr int kWide = V * kLanes;
  const float factor = scaling * kLog2E;
  for (int v = 0; v < V; ++v, scores += kLanes, seen += kLanes, state += kLanes, kept += kLanes) {
    const VecI visible = *reinterpret_cast<const VecIU*>(seen);
    const VecF before = load(state);
    VecF maximum = before;
    for (int64_t t = 0; t < count; ++t) {
      const VecF score = load(scores + t * kWide);
      maximum = static_cast<int32_t>(t) < visible ? larger(maximum, score) : maximum;
    }
    VecF sum = {};
    for (int64_t t = 0; t < count; ++t) {
      VecF weight = exp2_clamped((load(scores + t * kWide) - maximum) * factor);
      weight = static_cast<int32_t>(t) < visible ? weight : VecF{};
      sum += weight;
      store(scores + t * kWide, weight);
    }
    const VecF shrunk = exp2_clamped((before - maximum) * factor);
    store(state, maximum);
    store(state + kWide, load(state + kWide) * shrunk + sum);
    store(kept, shrunk);
  }
}

template <int V>
void softmax_f32(float* scores, int64_t count, const int32_t* seen, float scaling, float* state, float* kept, void*) {
  softmax_chunk<V>(scores, count, seen, scaling, state, kept);
}

// Swaps, block by block, what lies off the diagonal: at the end row i's word j is row j's word i.
template <int distance = kLanes / 2>
inline void transpose(VecU (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & distance) == 0) swap_lanes<distance>(square[i], square[i + distance]);
  if constexpr (distance > 1) transpose<distance / 2>(square);
}

void pack_lanes(const uint32_t* const* rows, int64_t words, uint32_t* lanes, int64_t stride) {
  const int64_t whole = words / kLanes * kLanes;
  for (int64_t word = 0; word < whole; word += kLanes) {
    VecU square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = *reinterpret_cast<const VecUU*>(rows[i] + word);
    transpose(square);
    for (int i = 0; i < kLanes; ++i) *reinterpret_cast<VecUU*>(lanes + (word + i) * stride) = square[i];
  }
  for (int64_t word = whole; word < words; ++word)
    for (int i = 0; i < kLanes; ++i) lanes[word * stride + i] = rows[i][word];
}

void unpack_lanes(const float* lanes, int64_t stride, const float* factors, int64_t channels, float* rows, int64_t row_stride) {
  const VecF factor = load(factors);
  for (int64_t channel = 0; channel < channels; channel += kLanes) {
    VecU square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = (VecU)(load(lanes + (channel + i) * stride) * factor);
    transpose(square);
    for (int i = 0; i < kLanes; ++i) store(rows + i * row_stride + channel, (VecF)square[i]);
  }
}

template <int V>
constexpr MlaWidth kF32Width{Width<V>::kWide,      Width<V>::kTile, keys_tile<F32Word, V>, values_tile<F32Word, V>,
                             softmax_f32<V>, nullptr,         nullptr,               nullptr};

}  // namespace
}  // namespace sgl_batch
