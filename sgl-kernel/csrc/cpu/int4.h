// Owns the packed form of weights that are integers of four bits with a zero point and a scale, as GPTQ, AWQ and others round
// them. Nothing is lost: a form is taken only where it gives the numbers of bf16 to the last bit, but for the sign of zeros.
//
// Of each output, `group` neighbouring k are the bf16 nearest to scale * (code - zero). A panel has first a word of 32 bits for each
// column and group, [K / group][kPanel]: a scale of 16 significant bits as f32, which holds those of f16 and bf16, and the zero point
// in its lowest bits; then K / 8 times kPanel words of 32 bits.
//
// Half of kPanel words stand for 4 * kPanel numbers in the order of a panel of bf16, four groups of kPanel. Word i has four bits of
// its lower half for number i of each group, the first one's lowest, and four of its upper half for number kPanel / 2 + i. So one
// shift of a vector of words brings both where they are wanted: to the lowest bits, as an index, and to the last ones of a whole
// number in f32, whose exponent is put above them.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

constexpr int64_t kInt4BlockK = 32;  // of which groups have whole ones
constexpr int64_t kInt4WordK = 4;
constexpr uint32_t kInt4Zero = 15, kInt4Scale = 0xffffff00;  // the bits of a column's word that are the zero point, and the scale
static_assert(packed_bytes(DType::kInt4By64, kPanel * 64) == 4 * kPanel + 64 * kPanel / 2);

// How many numbers of an output have one scale; 0 for other number types.
constexpr int64_t int4_group(DType dtype) {
  switch (dtype) {
    case DType::kInt4By32: return 32;
    case DType::kInt4By64: return 64;
    case DType::kInt4By128: return 128;
    default: return 0;
  }
}

inline int64_t int4_scale_bytes(int64_t k, int64_t group) { return k / group * kPanel * 4; }

// A row of k integers to bf16, each less what its group lacks, times the group's scale: computed in f32, rounded once. Two integers
// of four bits a byte, the even ones lower, or one a byte, with a sign or without.
struct WideGroups {
  const float* lacks;
  const float* scales;
  int64_t group;  // even
};
void widen_nibble_row(const uint8_t* pairs, const WideGroups& groups, int64_t k, uint16_t* to);
void widen_byte_row(const uint8_t* integers, const WideGroups& groups, int64_t k, uint16_t* to);
void widen_byte_row(const int8_t* integers, const WideGroups& groups, int64_t k, uint16_t* to);

// Packs a plain panel of bf16, kPanel rows of k; false where a number has no such form, and what `to` holds is undefined.
bool pack_int4_panel(const uint16_t* plain, int64_t k, int64_t group, void* to);

// Back to plain rows. Zeros have no sign there, which no product can tell.
void unpack_int4_panel(const void* panel, int64_t k, int64_t group, uint16_t* plain);

// To a packed panel of bf16.
void decode_int4_panel(const Isa& isa, const void* panel, int64_t k, int64_t group, void* to);

}  // namespace sgl_batch
