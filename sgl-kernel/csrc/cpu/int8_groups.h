// Owns the packed form of weights that are integers of eight bits times scales: eight bits each, and a scale for a group of an
// output's neighbouring k. Products have the bits of the numbers of bf16 to which they round.
//
// A panel has first a scale in f32 for each column and group, [K / group][kPanel]. Then it has K * kPanel integers in the order of a
// panel of bf16. int8 whose outputs have one scale each, beside the weights, is another number type (DType::kI8).
#pragma once

#include <cstdint>

#include "block_scales.h"
#include "gemm.h"

namespace sgl_batch {

constexpr int64_t kInt8BlockK = 32;  // of which groups have whole ones
static_assert(packed_bytes(DType::kInt8By128, kPanel * 128) == 4 * kPanel + 128 * kPanel);

// How many numbers of an output have one scale; 0 for other number types.
constexpr int64_t int8_group(DType dtype) { return dtype == DType::kInt8By128 ? 128 : dtype == DType::kInt8By32 ? 32 : 0; }

// Packs integers as checkpoints have them, kPanel rows of k from a matrix's `row` on; those of a group share a scale.
void pack_int8_codes(const int8_t* integers, const BlockScales& scales, int64_t row, int64_t k, int64_t group, void* to);

// Packs a plain panel of bf16, kPanel rows of k; false where a number has no such form, and what `to` holds is undefined.
bool pack_int8_panel(const uint16_t* plain, int64_t k, int64_t group, void* to);

// Back to plain rows. Zeros have no sign there, which no product can tell.
void unpack_int8_panel(const void* panel, int64_t k, int64_t group, uint16_t* plain);

// To a packed panel of bf16.
void decode_int8_panel(const Isa& isa, const void* panel, int64_t k, int64_t group, void* to);

// Finds the integers and the one scale of a row of bf16 whose largest magnitude is 127 or 128 times the scale: 127 times and no
// rounding of the scale where that does. Returns the scale, or 0 where there is none, and what `to` holds is undefined.
float integers_of_row(const uint16_t* row, int64_t k, int8_t* to);

}  // namespace sgl_batch
