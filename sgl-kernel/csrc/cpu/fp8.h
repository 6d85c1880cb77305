// Owns the packed form of weights that are floats of eight bits (e4m3) times scales: eight bits each, and a scale for a group of an
// output's neighbouring k. Products have the bits of the numbers of bf16 to which they round.
//
// A panel has first a word of 32 bits for each column and group, [K / group][kPanel]: the scale in f32, times kFp8ScaleUp. Then it
// has K * kPanel bytes. A code is a sign, four bits of exponent and three of fraction, none of them an infinity or no number. Where
// one scale does for a group of all columns they have it, so that a code stands for one number of bf16 in all of them.
//
// 64 codes stand for two groups of kPanel numbers in the order of a panel of bf16: eight of the first group, eight of the second,
// the next eight of the first, and so on, as instructions that interleave bytes want them.
#pragma once

#include <cstdint>

#include "block_scales.h"
#include "gemm.h"

namespace sgl_batch {

constexpr int64_t kFp8BlockK = 32;  // of which groups have whole ones
constexpr int kFp8Bias = 7;
// A code's bits are those of a number of f32 that is so much too small, as it has the larger bias.
constexpr float kFp8ScaleUp = 0x1p120f;
static_assert(packed_bytes(DType::kFp8By128, kPanel * 128) == 4 * kPanel + 128 * kPanel);

// How many numbers of an output have one scale; 0 for other number types.
constexpr int64_t fp8_group(DType dtype) { return dtype == DType::kFp8By128 ? 128 : dtype == DType::kFp8By32 ? 32 : 0; }

inline int64_t fp8_scale_bytes(int64_t k, int64_t group) { return k / group * kPanel * 4; }

// A row of k numbers of e4m3 as checkpoints have it, times a scale for each `columns` of them, to bf16.
void widen_fp8_row(const uint8_t* codes, const float* scales, int64_t columns, int64_t k, uint16_t* to);

// Packs codes as checkpoints have them, kPanel rows of k from a matrix's `row` on; numbers of a group share a scale. False where a
// code is no number, and what `to` holds is undefined.
bool pack_fp8_codes(const uint8_t* codes, const BlockScales& scales, int64_t row, int64_t k, int64_t group, void* to);

// Packs a plain panel of bf16, kPanel rows of k; false where a number has no such form, and what `to` holds is undefined.
bool pack_fp8_panel(const uint16_t* plain, int64_t k, int64_t group, void* to);

// Back to plain rows.
void unpack_fp8_panel(const void* panel, int64_t k, int64_t group, uint16_t* plain);

// To a packed panel of bf16.
void decode_fp8_panel(const Isa& isa, const void* panel, int64_t k, int64_t group, void* to);

}  // namespace sgl_batch
