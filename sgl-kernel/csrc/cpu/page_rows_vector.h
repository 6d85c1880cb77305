// Owns moving numbers of several tokens into the packed order of pages, on the compiler's vector types, for one
// instruction set chosen by the including file, see gemm_vector.h. Which tokens, and where to, is decided by page_write.cpp.
#pragma once

#include "rows_vector.h"

namespace sgl_batch {
namespace {

// to[j][i] = from[i][j] for kLanes rows of kLanes words. Each round deals the first and the second half of the vectors
// out in turns, which moves one bit of a word's row number into its lane number.
inline void transpose_block(const char* from, int64_t from_stride, char* to, int64_t to_stride) {
  VecU low, high, now[kLanes], next[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    low[j] = j / 2 + j % 2 * kLanes;
    high[j] = low[j] + kLanes / 2;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) now[i] = *reinterpret_cast<const VecUU*>(from + i * from_stride);
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shuffle(now[i], now[i + kLanes / 2], low);
      next[2 * i + 1] = __builtin_shuffle(now[i], now[i + kLanes / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) now[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) *reinterpret_cast<VecUU*>(to + i * to_stride) = now[i];
}

void transpose_words(const void* from, int64_t from_stride, int64_t rows, int64_t words, void* to, int64_t to_stride) {
  const auto* in = static_cast<const char*>(from);
  auto* out = static_cast<char*>(to);
  const int64_t whole_rows = rows / kLanes * kLanes, whole_words = words / kLanes * kLanes;
  for (int64_t i = 0; i < whole_rows; i += kLanes)
    for (int64_t j = 0; j < whole_words; j += kLanes)
      transpose_block(in + i * from_stride + j * 4, from_stride, out + j * to_stride + i * 4, to_stride);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < whole_rows ? whole_words : 0; j < words; ++j)
      __builtin_memcpy(out + j * to_stride + i * 4, in + i * from_stride + j * 4, 4);
}

void zip_halves(const uint16_t* even, const uint16_t* odd, int64_t count, uint16_t* to) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const VecU low = __builtin_convertvector(*reinterpret_cast<const VecHU*>(even + i), VecU);
    const VecU high = __builtin_convertvector(*reinterpret_cast<const VecHU*>(odd + i), VecU);
    *reinterpret_cast<VecUU*>(to + 2 * i) = low | high << 16;
  }
  for (int64_t i = whole; i < count; ++i) {
    to[2 * i] = even[i];
    to[2 * i + 1] = odd[i];
  }
}

}  // namespace
}  // namespace sgl_batch
