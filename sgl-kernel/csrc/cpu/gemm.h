// Owns the contract between the drivers (experts, linear, attention) and the matrix kernels of one instruction set.
// It decides neither which instruction set runs (isa.cpp) nor how work is shared among threads (the drivers).
//
// A weight [N, K] is packed into panels of kPanel output columns; panel p begins at element p * kPanel * K and holds
//   bf16: [K / 2][w][2]   a pair of neighbouring k for each column, as bf16 dot-product instructions want it
//   int8: [K / 2][w][2]   likewise; it is widened to bf16, which holds it exactly, before it meets rows or as it does
//   f32:  [K][w]
//   fp4, int4, fp8, int8 in groups: see fp4.h, int4.h, fp8.h and int8_groups.h; they are taken to bf16 before they meet rows or as they do
// with w = min(kPanel, N - p * kPanel), so that a packed matrix has exactly the size of the plain one.
//
// Rows of activations lie as they are: bf16 where Isa::bf16_pairs and the weight is bf16, otherwise f32. Kernels that have
// TileCut::row_blocks can take them by blocks of k, too: [k / kBlockK][row][kBlockK].
//
// A tile adds up each output in an order that depends on k alone, however many rows it has: a row's result does not
// depend on the rows beside it. A k cut into parts at multiples of kBlockK, each added to what was there, gives the bits of the
// whole. A chained tile's order is one chain of multiply-adds over k in ascending order, so that its k may be cut anywhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_batch {

constexpr int kPanel = 32;
constexpr int kMaxRows = 48;  // of a tile, on any instruction set
constexpr int64_t kStepBytes = 4 * kPanel;  // of a panel: one f32 or one pair of bf16 for each column
constexpr int64_t kLineBytes = 64;  // of a cache line
constexpr int64_t kWayBytes = 4096;  // of a first cache, which has but 8 to 12 ways: lines so far apart share a place in each
constexpr int64_t kBlockK = 32;  // numbers of a row, see below
constexpr int64_t kAnyK = int64_t{1} << 40;
constexpr int64_t kTilesOfPassingRows = 8;  // so many tiles read a panel often enough for rows to pass, see Tile
constexpr int64_t kTilesWithoutParts = 2;  // so few tiles read a panel too rarely for k to be cut, see TileCut::best_k

// How far apart rows of so many bytes should begin, so that the caches have room for those of a tile.
inline int64_t row_stride(int64_t bytes) { return bytes % kWayBytes == 0 ? bytes + kLineBytes : bytes; }

// Integers of four bits have a scale for each 32, 64 or 128, floats and integers of eight bits for each 32 or 128; those of kI8 have
// one for each output, beside them.
enum class DType { kBf16, kF32, kI8, kFp4, kInt4By32, kInt4By64, kInt4By128, kFp8By32, kFp8By128, kInt8By32, kInt8By128 };

// Of a number; those that share scales have none, see packed_bytes.
inline size_t size_of(DType dtype) { return dtype == DType::kI8 ? 1 : dtype == DType::kBf16 ? 2 : dtype == DType::kF32 ? 4 : 0; }

// Bytes of so many numbers of packed panels, whole ones.
constexpr int64_t packed_bytes(DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kFp4: return count / 32 * 17;
    case DType::kInt4By32: return count / 32 * 20;
    case DType::kInt4By64: return count / 64 * 36;
    case DType::kInt4By128: return count / 128 * 68;
    case DType::kFp8By32:
    case DType::kInt8By32: return count / 32 * 36;
    case DType::kFp8By128:
    case DType::kInt8By128: return count / 128 * 132;
    case DType::kI8: return count;
    case DType::kBf16: return count * 2;
    case DType::kF32: return count * 4;
  }
  return 0;
}

// How many steps over k a tile takes.
inline int64_t tile_steps(DType weight, int64_t k) { return weight == DType::kF32 ? k : (k + 1) / 2; }

// Whether groups of numbers share scales, so that panels are decoded.
inline bool has_groups(DType dtype) { return size_of(dtype) == 0; }

// What a weight is when rows meet it.
inline DType tile_dtype(DType weight) { return weight == DType::kF32 ? DType::kF32 : DType::kBf16; }

inline float bf16_to_f32(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest, ties to even. No number is a NaN.
inline uint32_t number_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Likewise; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>(number_to_bf16(value));
}

// What will be read soon: a tile brings `step` bytes of a panel closer with each of its own steps over k, and `rows_step`
// bytes of rows, where these are given. They may be given where the panel takes no more than a cache line in a step.
struct Ahead {
  const void* from;
  int64_t step;
  const void* rows = nullptr;
  int64_t rows_step = 0;
  int64_t rows_block = 0;  // where this is not 0: of each kBlockK what is brought of rows begins so many bytes after the last
};

// c[m][kPanel] = a[m, K] x panel[K, kPanel], or c + that. Rows of a are `a_stride` bytes apart, those of c `c_stride`
// floats. The panel has its full width.
struct Tile {
  const void* a;
  int64_t a_stride;
  const void* panel;
  int64_t k;
  int m;
  float* c;
  int64_t c_stride;
  bool add;
  Ahead ahead;
  int64_t a_block = 0;  // bytes from one line of a row to the next; 0: they follow one another
  uint32_t base = 0;         // of a coded panel, or the group of one of int4, fp8 or int8
  bool rows_pass = false;    // the first cache is for the panel, which many tiles read: rows need not stay in it
  void* kept = nullptr;  // where a panel's numbers go for TileKernel::run_kept, or null
};
using TileFn = void (*)(const Tile& tile);
// The same, where the rows' next `second_k` numbers meet the panel `second`. The tile's k is whole blocks of kBlockK.
using TwoPanelsFn = void (*)(const Tile& tile, const void* second, int64_t second_k);

// How a kernel's rows and its k are best cut into tiles.
struct TileCut {
  int max_rows;             // of a tile, at most kMaxRows
  int full_rows = 0;        // of most tiles, see Tiles in tasks.h; 0: there are as few equal ones as there can be
  bool row_blocks = false;  // rows are best given by blocks of k
  int64_t best_k = kAnyK;   // a longer k is best cut into parts of it, whole lines, whose panel stays in the first cache
  int64_t passing_k = kAnyK;  // the same where rows pass by the first cache, see Tile

  // Of most tiles.
  int usual_rows() const { return full_rows == 0 ? max_rows : full_rows; }
  // Rows that are cut into blocks before they are cut into tiles have a multiple of this in each but the last.
  int block_unit() const { return full_rows == 0 ? 1 : full_rows; }
  // Whether a longer k than best_k is cut for so many tiles of a panel.
  bool cuts_k(int64_t tiles) const { return tiles > kTilesWithoutParts && best_k != kAnyK; }
};

// The tiles for weights of one number type, all of the same order.
struct TileKernel {
  TileFn run;         // takes panels as they are when rows meet them
  TileFn run_i8;      // takes panels of int8 as they lie; null where they are never met
  TileFn run_half;    // the first half of the columns alone, the others of c stay as they are; null where there is none
  TwoPanelsFn run_two;  // null where a second panel takes a call of its own
  TileFn run_coded;   // takes coded panels as they lie, whole ones; null where they are decoded before
  TileFn run_fp4;     // takes panels of fp4 as they lie; null where they are decoded before
  TileFn run_int4;    // takes panels of int4 likewise
  TileFn run_fp8;     // takes panels of fp8 likewise
  TileFn run_int8_groups;  // takes panels of int8 in groups likewise
  TileFn run_kept;    // takes what another tile kept of a panel; null where tiles keep nothing. See Isa::row_dtype
  TileFn run_kept_half;  // the same as run_half; null where there is none
  TileCut cut;
  bool chained;       // see above
  void (*release)();  // gives back what a tile sets up on its thread, see TileUse in tasks.h; null where it sets up nothing
};

// Rows of kPanel f32, `from_stride` apart, into rows of bf16 or f32, `to_stride` bytes apart, rounded to nearest.
using StoreFn = void (*)(const float* from, int64_t from_stride, int rows, DType dtype, void* to, int64_t to_stride);
// Rows of `count` f32, `from_stride` apart, each times its factor, stored likewise one after the other.
using StoreScaledFn = void (*)(const float* from, int64_t from_stride, const float* factors, int64_t rows, int64_t count,
                               DType dtype, void* to);
// silu(gate) * up over rows of kPanel, stored likewise; gate and up have rows of kPanel one after the other.
using SiluMulFn = void (*)(const float* gate, const float* up, int rows, DType dtype, void* to, int64_t to_stride);
// g * sigmoid(alpha * g) * (u + 1) likewise, with g = min(gate, limit) and u = up between -limit and limit.
using ClampedMulFn = void (*)(const float* gate, const float* up, int rows, float alpha, float limit, DType dtype, void* to,
                              int64_t to_stride);

// int8 to bf16.
using WidenFn = void (*)(const int8_t* from, int64_t count, uint16_t* to);
// Steps of a panel of bf16 to what a tile keeps of it where rows are f32.
using WidenPanelFn = void (*)(const void* panel, int64_t steps, float* to);
// Blocks of a coded panel to numbers of bf16, with `base` the least exponent; see coded.h.
using DecodeFn = void (*)(const void* blocks, int64_t count, uint32_t base, uint16_t* to);
// Blocks of a panel of fp4, whose powers and words begin there, to numbers of bf16; see fp4.h.
using DecodeFp4Fn = void (*)(const uint8_t* powers, const void* words, int64_t blocks, uint16_t* to);
// Some k of a panel of int4, whose scales and words begin there, to numbers of bf16; see int4_vector.h.
using DecodeInt4Fn = void (*)(const uint32_t* scales, const void* words, int64_t k, int64_t group, uint16_t* to);
// Some k of a panel of fp8, or of int8, likewise; see fp8_vector.h and int8_groups_vector.h.
using DecodeScaledFn = void (*)(const float* scales, const void* words, int64_t k, int64_t group, uint16_t* to);
// Rows of kPanel f32, `c_stride` apart, times `scales`, column by column.
using ScaleColumnsFn = void (*)(float* c, int64_t c_stride, int rows, const float* scales);

constexpr int kSoftmaxRoom = 15;  // numbers beyond those of the rows, for whole vectors

// The step of a softmax over blocks for some rows, at most kMaxRows. Of `width` scores (a multiple of kPanel) of row i
// those in [first[i], valid[i]) count; their weights exp(scaling * (score - maximum)), zero for the others, go to `weights`
// in the given number type; f32 weights that are not coarse may lie in the place of the scores. Rows of scores and weights are
// `stride` numbers apart. maxima and weight_sums hold each row's maximum and sum of weights, minus infinity and 0 where there is
// nothing yet, with room for kSoftmaxRoom more, which keep what they hold; scaling is above 0. The maximum is the largest score so
// far, or one near enough to it for floating-point weights. What was added up before, rows of `sums_stride` numbers, shrinks where
// it grows.
struct SoftmaxRows {
  int rows;
  float* scores;
  int64_t stride;
  const int64_t* first;
  const int64_t* valid;
  int64_t width;
  float scaling;
  float* maxima;
  float* weight_sums;
  DType dtype;
  void* weights;
  float* sums;
  int64_t sums_stride;
  bool coarse;  // weights may be off by 1.1e-4 of each: what is added up by them is rounded to bf16
};
using SoftmaxStepFn = void (*)(const SoftmaxRows& rows);

// One row of an RMS norm: h = x + residual, which goes to residual_out (both may be null); see norm_rope.h.
struct NormRow {
  const void* x;
  const void* residual;
  void* residual_out;
  void* out;
};
// `row`: scratch of `width` floats. The sum of squares is added up in an order that depends on the width alone.
using NormRowFn = void (*)(const NormRow& r, const float* weight, float eps, int64_t width, DType dtype, float* row);
// Turns 2 * half numbers of a head in place; pairs lie `half` apart where `neox`, otherwise side by side.
using RotateHeadFn = void (*)(void* head, const float* cosine, const float* sine, int64_t half, bool neox, DType dtype);

// What happens to each head of one token: an RMS norm, rounded to `dtype`, then the rotation of its first 2 * half numbers.
struct NormRotate {
  int64_t width, half;
  const float* weight;
  float eps;
  const float* cosine;
  const float* sine;
  bool neox;
  DType dtype;
};
// Heads one after the other, in place. `row`: scratch of `width` floats. The bits are those of the two above.
using NormRotateHeadsFn = void (*)(void* heads, int64_t count, const NormRotate& c, float* row);

// Words of 4 bytes: word j of row i goes to word i of row j. Rows are `from_stride` and `to_stride` bytes apart.
using TransposeWordsFn = void (*)(const void* from, int64_t from_stride, int64_t rows, int64_t words, void* to,
                                  int64_t to_stride);
// to[2 * i] = even[i] and to[2 * i + 1] = odd[i].
using ZipHalvesFn = void (*)(const uint16_t* even, const uint16_t* odd, int64_t count, uint16_t* to);

// How rows choose among experts: `top_k` of those in its `kept_groups` best groups of `groups` equal ones, by softmax or
// sigmoid of its logits, plus `bias` for the choice alone (with room for kPanel more than the experts, or null). See topk.h.
struct TopKRule {
  int64_t experts, groups, kept_groups, top_k;
  bool sigmoid, renormalize;
  const float* bias;
};
// Some rows, at most kTopKRows: rows of logits are `stride` bytes apart, those of weights and ids `top_k` numbers.
struct TopKRows {
  int64_t count;
  const void* logits;
  int64_t stride;
  DType dtype;
  float* weights;
  int32_t* ids;
};
constexpr int64_t kTopKRows = 8;
// For each row kPanel numbers more than there are experts, and as many keys for groups.
struct TopKScratch {
  float* scores;
  int32_t* keys;
  int32_t* group_keys;
};
using ChooseFn = void (*)(const TopKRule& rule, const TopKRows& rows, const TopKScratch& scratch);

struct Isa {
  const char* name;
  bool bf16_pairs;  // activations meet bf16 weights as bf16 pairs
  TileKernel tile_bf16;
  TileKernel tile_f32;  // chained, and sets up nothing
  StoreFn store;
  StoreScaledFn store_scaled;
  SiluMulFn silu_mul;
  ClampedMulFn clamped_mul;
  SoftmaxStepFn softmax_step;
  NormRowFn norm_row;
  RotateHeadFn rotate_head;
  WidenFn widen;
  WidenPanelFn widen_panel;
  DecodeFn decode;
  DecodeFp4Fn decode_fp4;
  DecodeInt4Fn decode_int4;
  DecodeScaledFn decode_fp8;
  DecodeScaledFn decode_int8_groups;
  ScaleColumnsFn scale_columns;
  ChooseFn choose;
  TransposeWordsFn transpose_words;
  ZipHalvesFn zip_halves;
  NormRotateHeadsFn norm_rotate_heads;

  // What rows of activations must be to meet a weight. Tiles keep a panel's numbers for others likewise, bf16 as `run` takes
  // it or f32 as [K][kPanel], which saves them the widening.
  DType row_dtype(DType weight) const { return bf16_pairs ? tile_dtype(weight) : DType::kF32; }
  const TileKernel& tile(DType weight) const { return weight == DType::kF32 ? tile_f32 : tile_bf16; }
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
extern const TileKernel kAmxBf16Tile;
// What AVX512-VBMI adds: tables of bytes, by which panels of fp8 are taken to bf16.
struct Fp8Tables {
  TileFn run, run_widened;  // for rows of bf16 and of f32
  DecodeScaledFn decode;
};
extern const Fp8Tables kFp8Avx512Vbmi;
#endif

}  // namespace sgl_batch
