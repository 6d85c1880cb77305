// Owns the packed form of weights that are numbers of mxfp4: four bits each, and an exponent for 32. Nothing is lost.
//
// Of each output, 32 neighbouring k are numbers of {0, 0.5, 1, 1.5, 2, 3, 4, 6} with a sign, times one power of two. A panel has
// first a byte for each column and 32 k, [K / 32][kPanel], the power of two plus kFp4Bias; then K / 4 times kPanel words of 16 bits.
// Four bits are a sign, the highest, and a number of the list above.
//
// So many words stand for 4 * kPanel numbers in the order of a panel of bf16, four groups of kPanel. Word i has four bits for number
// i of each group, the first one's lowest.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

constexpr int64_t kFp4BlockK = 32;  // which have one power of two
constexpr int64_t kFp4WordK = 4;
constexpr int kFp4Bias = 127;
constexpr int kFp4MostPower = 252;  // with kFp4Bias: of larger ones the largest number is not finite in bf16
static_assert(packed_bytes(DType::kFp4, kPanel * kFp4BlockK) == kPanel + 2 * kPanel * kFp4BlockK / kFp4WordK);

inline int64_t fp4_power_bytes(int64_t k) { return k / kFp4BlockK * kPanel; }

// A row of k numbers of mxfp4 as checkpoints have it to bf16: `blocks` have two numbers a byte, the even ones lower, `powers` a byte
// for kFp4BlockK.
void widen_mxfp4_row(const uint8_t* blocks, const uint8_t* powers, int64_t k, uint16_t* to);

// Whether a matrix [n, k] has whole panels of whole blocks.
inline bool fp4_takes(int64_t n, int64_t k) { return n > 0 && k > 0 && n % kPanel == 0 && k % kFp4BlockK == 0; }

// Packs a plain panel of bf16, kPanel rows of k; false where a number is none of mxfp4, and what `to` holds is undefined.
bool pack_fp4_panel(const uint16_t* plain, int64_t k, void* to);

// Back to plain rows.
void unpack_fp4_panel(const void* panel, int64_t k, uint16_t* plain);

// To a packed panel of bf16. Zeros have no sign there, which no product can tell.
void decode_fp4_panel(const Isa& isa, const void* panel, int64_t k, void* to);

}  // namespace sgl_batch
