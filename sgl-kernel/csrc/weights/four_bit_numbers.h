// Owns packing matrices of four-bit numbers from how checkpoints store them: numbers, scales and zero points apart.
#pragma once

#include <cstdint>

#include "../cpu/fp4.h"
#include "../cpu/int4.h"

namespace sgl_batch {

// How a file has the numbers of a matrix [n, k].
enum class FourBitLayout {
  kRows,   // a row for each output, of words of eight neighbouring inputs
  kGptq,   // a row for eight inputs, of a word for each output
  kAwq,    // a row for each input, of words of eight neighbouring outputs in another order
  kMxfp4,  // a row for each output, of bytes of two neighbouring inputs that are no integers; those of gate and up alternate
};

// Integers. Scales lie as [n, groups] beside kRows, else as [groups, n]. Zero points have four bits, and lie as [n / 8, groups] or
// [groups, n / 8] words.
struct FourBitNumbers {
  FourBitLayout layout = FourBitLayout::kRows;
  int64_t group = 0;  // inputs with one scale; 0 for all of a row
  bool bf16_scales = false;  // otherwise f16
  bool has_zeros = false;  // otherwise all are 8
  int64_t zero_lack = 0;  // what is added to them

  int64_t groups(int64_t k) const { return group == 0 ? 1 : k / group; }
  int64_t scale_bytes(int64_t n, int64_t k) const { return n * groups(k) * 2; }
  int64_t zero_bytes(int64_t n, int64_t k) const { return has_zeros ? n * groups(k) / 2 : 0; }
  // Of one row of the file, and how many of them a chunk must have a multiple of.
  int64_t row_bytes(int64_t n, int64_t k) const;
  int64_t rows(int64_t n, int64_t k) const;
  int64_t rows_together() const;
};

// Puts scales and zero points into the words of all panels of a packed matrix. Returns what is wrong with them; null for nothing.
const char* put_words(const FourBitNumbers& stored, const char* scales, const char* zeros, int64_t n, int64_t k, DType dtype,
                      char* packed);

// Puts the integers of rows [first, first + rows) of the file into panels.
void put_integers(const FourBitNumbers& stored, const char* from, int64_t first, int64_t rows, int64_t n, int64_t k, DType dtype,
                  char* packed);

// Packs kPanel rows of k numbers of mxfp4 with their powers of two, a byte for kFp4BlockK, each row so many bytes after the one
// before. False where numbers are not normal ones of bf16, and what `panel` holds is undefined.
struct Rows {
  const uint8_t* first;
  int64_t stride;
};
bool pack_mxfp4_rows(const Rows& numbers, const Rows& powers, int64_t k, char* panel);

}  // namespace sgl_batch
