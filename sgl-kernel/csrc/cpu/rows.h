// Owns what is done to single rows of f32 between products. Element by element, one rounding each: the same bits on
// every instruction set.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

void add_row(float* to, const float* from, int64_t count);                   // to += from
void read_row(float* to, const void* from, DType dtype, int64_t count);      // to = from
void write_row(void* to, DType dtype, const float* from, int64_t count);     // to = from, rounded to dtype

// Brings bytes that are read next to the first cache.
inline void fetch(const void* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 3);
  asm volatile("");  // GCC takes a function that only prefetches for one without effect, and leaves out its calls
}

// The same for bytes that are written next, so that no other core keeps them. The plain x86-64 that is compiled for lacks the
// instruction, which a processor without it takes for none.
inline void fetch_to_write(const void* to, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) {
    const char* line = static_cast<const char*>(to) + at;
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*line));
#else
    __builtin_prefetch(line, 1, 3);
#endif
  }
}

// So many bytes of each of some rows that begin `stride` bytes apart.
inline void fetch_rows_to_write(const char* first, int64_t stride, int rows, size_t bytes) {
  for (int i = 0; i < rows; ++i) fetch_to_write(first + i * stride, bytes);
}

// A row line by line, `block` bytes apart.
void spread_row(void* to, int64_t block, const void* from, int64_t bytes);

void convert_row(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t count);

}  // namespace sgl_batch
