// Owns the contract between the drivers (experts, linear) and the matrix kernels of one instruction set.
// It decides neither which instruction set runs (isa.cpp) nor how work is shared among threads (the drivers).
//
// A weight [N, K] is packed into panels of kPanel output columns; panel p begins at element p * kPanel * K and holds
//   bf16: [K / 2][w][2]   a pair of neighbouring k for each column, as bf16 dot-product instructions want it
//   f32:  [K][w]
// with w = min(kPanel, N - p * kPanel), so that a packed matrix has exactly the size of the plain one.
//
// Activations are packed into tiles of at most Isa::max_rows rows:
//   bf16 pairs [K / 2][m][2] where Isa::bf16_pairs and the weight is bf16, otherwise f32 [K][m].
//
// Every output is one chain of multiply-adds over k in ascending order, whatever m is: a row's result does not depend
// on the rows beside it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_batch {

constexpr int kPanel = 32;
constexpr int kMaxRows = 12;

enum class DType { kBf16, kF32 };

inline size_t size_of(DType dtype) { return dtype == DType::kBf16 ? 2 : 4; }

inline float bf16_to_f32(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// c[m][kPanel] = a[m, K] x panel[K, kPanel]; the panel has its full width.
using TileFn = void (*)(const void* a, const void* panel, int64_t k, int m, float* c);
// out[m][kPanel] = silu(gate) * up, element by element.
using SiluMulFn = void (*)(const float* gate, const float* up, int64_t count, float* out);

// One row's step of a softmax over blocks. `scores` become weights exp(scaling * score - maximum), zero from `valid` to
// `width`; state holds the running maximum and sum. Returns the factor by which what was added up before must shrink.
using SoftmaxStepFn = float (*)(float* scores, int64_t valid, int64_t width, float scaling, float* state);

struct Isa {
  const char* name;
  int max_rows;     // rows of a tile, at most kMaxRows
  bool bf16_pairs;  // activations meet bf16 weights as bf16 pairs
  TileFn tile_bf16;
  TileFn tile_f32;
  SiluMulFn silu_mul;
  SoftmaxStepFn softmax_step;
};

// The best instruction set of this machine, or the one that SGL_BATCH_ISA names. Throws std::runtime_error when it
// names one that this machine lacks.
const Isa& isa();

// The names of all instruction sets that this machine can run, best first, separated by commas.
const char* runnable_isas();

extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2;
extern const Isa kAvx512;
extern const Isa kAvx512Bf16;
#endif

}  // namespace sgl_batch
