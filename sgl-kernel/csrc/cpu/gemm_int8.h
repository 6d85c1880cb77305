// Owns the contract between the drivers of products of int8 with int8 (experts_int8, linear_int8) and their matrix kernels,
// and between both and the rows that are rounded for them. It does not decide which kernel runs (gemm_int8.cpp).
//
// A weight [N, K] is packed into panels of kPanel output columns; panel p begins at byte p * kPanel * K and holds
//   [K / 4][w][4]  four neighbouring k for each column, and then [w][K % 4]
// with w = min(kPanel, N - p * kPanel), so that a packed matrix has exactly the size of the plain one. Instructions multiply
// unsigned by signed bytes: a packed number is the plain one plus 128, unsigned.
//
// Rows of activations are signed, and filled up with zeros to a multiple of kRowBytes. Kernels that have TileCut::row_blocks
// can take them by blocks of k, too: [k / kRowBytes][row][kRowBytes].
//
// Sums go around at the ends of int32. With what takes back the 128 they are exact, as long as k is at most kMostInputs: a
// row's result depends on nothing but the row, and is the same from every kernel.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

constexpr int64_t kQuad = 4;        // numbers of a step over k
constexpr int64_t kRowBytes = kLineBytes;  // a multiple of what any kernel reads of a row at once
constexpr int kUnsignedShift = 128;
constexpr int64_t kMostInputs = (int64_t{1} << 31) / (127 * 128) - 1;

// c[m][kPanel] = a[m, k] x panel[k, kPanel], or c + that where k is cut into parts (TileCut::best_k), in int32. Rows of a are
// `a_stride` bytes apart. The panel has its full width and whole steps over k.
struct Int8Tile {
  const int8_t* a;
  int64_t a_stride;
  const uint8_t* panel;
  int64_t steps;
  int m;
  int32_t* c;
  Ahead ahead;
  bool add = false;
  int64_t a_block = kRowBytes;  // bytes from one kRowBytes of a row to the next
  bool ahead_is_near = true;    // what is ahead is brought to the first cache, else to the second
  bool rows_pass = false;       // see Tile
};
using Int8TileFn = void (*)(const Int8Tile& tile);

// How sums become numbers: ((sum + its row's shift) * its row's scale) * its column's scale. A row's shift is -kUnsignedShift
// times the sum of its numbers, which takes back what was added to the weights.
struct Scaling {
  const int32_t* row_shifts;
  const float* row_scales;
  const float* column_scales;
};

// A tile whose sums become numbers at once: its c is not written, but `to`, rows of kPanel f32 that begin `to_stride` floats
// apart. All kPanel columns have a scale.
struct ScaledInt8Tile {
  Int8Tile sums;
  Scaling by;
  float* to;
  int64_t to_stride;
};
using ScaledInt8TileFn = void (*)(const ScaledInt8Tile& tile);

// k numbers of bf16 or f32 over `scale`, rounded to nearest, ties to even, and no larger than 127; returns the sum of what it
// writes. Each kRowBytes of it begin `block` bytes after the last.
using DivideFn = int32_t (*)(const void* row, DType dtype, int64_t k, float scale, int8_t* to, int64_t block);
int32_t divide_plainly(const void* row, DType dtype, int64_t k, float scale, int8_t* to, int64_t block);

struct Int8Kernel {
  const char* name;
  Int8TileFn run;
  ScaledInt8TileFn run_scaled = nullptr;  // null where sums are scaled afterwards; the bits are the same
  DivideFn divide;
  TileCut cut;
  void (*release)() = nullptr;  // as in TileKernel
};

// The best kernel of this machine that the instruction set in use (`isa`) allows.
const Int8Kernel& int8_kernel();

extern const Int8Kernel kPortableInt8;
#if defined(__x86_64__)
extern const Int8Kernel kAvx2Int8;
extern const Int8Kernel kAvx512VnniInt8;
extern const Int8Kernel kAmxInt8;
// The same bits.
int32_t divide_avx512(const void* row, DType dtype, int64_t k, float scale, int8_t* to, int64_t block);
#endif

}  // namespace sgl_batch
