// Owns the coded form of a packed panel of bf16: 12 bits for each number, and nothing is lost.
//
// Nearly all weights of a panel have one of 16 neighbouring exponents. So of each number there are sign and fraction, a byte,
// and in four bits how far its exponent lies above the panel's `base`. Numbers with another exponent are listed.
//
// A coded panel lies where it lay before: K / 4 blocks of kCodedBlockBytes, each of four k for all columns, then, in the quarter
// that they leave, the list of Uncoded in ascending order, which ends with kNoPlace.
//
// A block stands for 4 * kPanel numbers in the order of the panel without codes, four groups of kPanel. It has three times
// kPanel words of 16 bits. Word i of the first ones has sign and fraction of number i of the first group where they belong in
// it, and those of the second group's where they belong after a swap of the word's bytes. Word i of the second ones has those of
// the other two groups likewise. Word i of the third ones has four bits for each group, the first one's lowest.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

constexpr int64_t kCodedBlockK = 4;
constexpr int64_t kCodedBlockBytes = 6 * kPanel;
constexpr int64_t kCodedBlockNumbers = kCodedBlockK * kPanel;

// A number that has no code. `place`: where it lies in the panel without codes.
struct Uncoded {
  uint32_t place;
  uint16_t number, unused;
};
constexpr uint32_t kNoPlace = ~uint32_t{0};

// Codes a full panel to another place of its size; returns its base plus one, or 0 where it cannot be coded: where K is not a
// multiple of kCodedBlockK, or the list would need too much room. Then `to` may hold anything.
uint8_t code_panel(const void* packed, int64_t k, void* to);
// The panel as it was.
void uncode_panel(void* panel, int64_t k, uint8_t mark, void* scratch);

// A panel's bytes that hold codes; the list follows.
inline int64_t coded_bytes(int64_t k) { return k / kCodedBlockK * kCodedBlockBytes; }
inline const Uncoded* uncoded(const void* panel, int64_t k) {
  return reinterpret_cast<const Uncoded*>(static_cast<const char*>(panel) + coded_bytes(k));
}

// Writes the panel as it was to `to`.
void decode_panel(const Isa& isa, const void* panel, int64_t k, uint8_t mark, void* to);

}  // namespace sgl_batch
