// Owns the matrix kernels on the compiler's vector types, for one instruction set chosen by the including file, which
// sets the target before it includes anything and defines SGL_BATCH_LANES (floats of one vector) and SGL_BATCH_ROWS.
// No templates of the standard library here: the linker could hand their copies to code for lesser machines.
#pragma once

#include "gemm.h"

namespace sgl_batch {
namespace {

constexpr int kLanes = SGL_BATCH_LANES;
constexpr int kRows = SGL_BATCH_ROWS;
constexpr int kVectors = 2;  // vectors of columns that a block of accumulators is wide

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef float VecFU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef uint32_t VecUU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

template <int M>
inline void store_block(const VecF (&acc)[M][kVectors], float* c, int column) {
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < kVectors; ++v)
      *reinterpret_cast<VecFU*>(c + i * kPanel + column + v * kLanes) = acc[i][v];
}

template <int M>
void tile_f32_rows(const float* a, const float* panel, int64_t k, float* c) {
  for (int column = 0; column < kPanel; column += kLanes * kVectors) {
    VecF acc[M][kVectors] = {};
    const float* b = panel + column;
    const float* x = a;
    for (int64_t step = 0; step < k; ++step, b += kPanel, x += M) {
      VecF weight[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) weight[v] = *reinterpret_cast<const VecFU*>(b + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[i][v] += weight[v] * x[i];
    }
    store_block<M>(acc, c, column);
  }
}

// A bf16 pair in a 32-bit lane: its low half is the even k, its high half the odd one.
template <int M>
void tile_bf16_rows(const float* a, const uint32_t* panel, int64_t k, float* c) {
  for (int column = 0; column < kPanel; column += kLanes * kVectors) {
    VecF acc[M][kVectors] = {};
    const uint32_t* b = panel + column;
    const float* x = a;
    for (int64_t step = 0; step < k; step += 2, b += kPanel, x += 2 * M) {
      VecF even[kVectors], odd[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const VecU pair = *reinterpret_cast<const VecUU*>(b + v * kLanes);
        even[v] = (VecF)(pair << 16);
        odd[v] = (VecF)(pair & 0xffff0000u);
      }
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[i][v] += even[v] * x[i];
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[i][v] += odd[v] * x[M + i];
    }
    store_block<M>(acc, c, column);
  }
}

template <int M>
struct TileF32 {
  static void run(const void* a, const void* panel, int64_t k, float* c) {
    tile_f32_rows<M>(static_cast<const float*>(a), static_cast<const float*>(panel), k, c);
  }
};

template <int M>
struct TileBf16 {
  static void run(const void* a, const void* panel, int64_t k, float* c) {
    tile_bf16_rows<M>(static_cast<const float*>(a), static_cast<const uint32_t*>(panel), k, c);
  }
};

// One compiled kernel for each number of rows.
template <template <int> class Tile, int M>
void by_rows(const void* a, const void* panel, int64_t k, int m, float* c) {
  if constexpr (M > 1) {
    if (m < M) return by_rows<Tile, M - 1>(a, panel, k, m, c);
  }
  Tile<M>::run(a, panel, k, c);
}

// exp for |x| where SiLU needs it: within two units of the last place, no branches, so that it becomes vector code.
inline float exp_f32(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = __builtin_floorf(x * 1.44269504088896341f + 0.5f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, 4);
  return p * scale;
}

// `count` is a multiple of kPanel.
void silu_mul(const float* gate, const float* up, int64_t count, float* out) {
  for (int64_t base = 0; base < count; base += kPanel)
#pragma GCC ivdep
    for (int64_t i = base; i < base + kPanel; ++i) out[i] = gate[i] / (1.0f + exp_f32(-gate[i])) * up[i];
}

// `width` is a multiple of kPanel. Partial maxima and sums, one for each index modulo kPanel, are joined in order.
float softmax_step(float* scores, int64_t valid, int64_t width, float scaling, float* state) {
  for (int64_t i = valid; i < width; ++i) scores[i] = 0.0f;
  if (valid == 0) return 1.0f;
  float lanes[kPanel];
  for (int j = 0; j < kPanel; ++j) lanes[j] = -3.0e38f;
  const int64_t whole = valid / kPanel * kPanel;
  for (int64_t base = 0; base < whole; base += kPanel)
    for (int j = 0; j < kPanel; ++j) {
      const float scaled = scores[base + j] * scaling;
      scores[base + j] = scaled;
      lanes[j] = scaled > lanes[j] ? scaled : lanes[j];
    }
  for (int64_t i = whole; i < valid; ++i) {
    scores[i] *= scaling;
    lanes[i - whole] = scores[i] > lanes[i - whole] ? scores[i] : lanes[i - whole];
  }
  float maximum = state[0];
  for (int j = 0; j < kPanel; ++j) maximum = lanes[j] > maximum ? lanes[j] : maximum;
  for (int j = 0; j < kPanel; ++j) lanes[j] = 0.0f;
  for (int64_t base = 0; base < valid; base += kPanel)
#pragma GCC ivdep
    for (int j = 0; j < kPanel; ++j) scores[base + j] = exp_f32(scores[base + j] - maximum);
  for (int64_t i = valid; i < width; ++i) scores[i] = 0.0f;
  for (int64_t base = 0; base < valid; base += kPanel)
    for (int j = 0; j < kPanel; ++j) lanes[j] += scores[base + j];
  float sum = 0.0f;
  for (int j = 0; j < kPanel; ++j) sum += lanes[j];
  const float kept = state[1] == 0.0f ? 1.0f : exp_f32(state[0] - maximum);
  state[0] = maximum;
  state[1] = state[1] * kept + sum;
  return kept;
}

}  // namespace
}  // namespace sgl_batch
