// Owns decoding packed panels number by number, as the headers of each form have it, and transposing words: what a kernel's own is
// checked with.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "coded.h"
#include "fp4.h"
#include "fp8.h"
#include "int4.h"
#include "int8_groups.h"

namespace sgl_batch {

// Coded blocks to numbers, as coded.h has them.
inline void decode_plainly(const void* blocks, int64_t count, uint32_t base, uint16_t* to) {
  const auto* from = static_cast<const uint16_t*>(blocks);
  for (int64_t block = 0; block < count; ++block, from += 3 * kPanel)
    for (int group = 0; group < 4; ++group)
      for (int i = 0; i < kPanel; ++i) {
        const uint32_t word = from[group / 2 * kPanel + i], own = group % 2 == 0 ? word : word << 8 | word >> 8;
        const uint32_t above = from[2 * kPanel + i] >> 4 * group & 15;
        *to++ = static_cast<uint16_t>((own & 0x807f) | (base + above) << 7);
      }
}

// Plain rows of k numbers to a panel of bf16 that is not packed further; returns where it ends.
inline uint16_t* put_pairs(const std::vector<uint16_t>& rows, int64_t k, uint16_t* to) {
  for (int64_t i = 0; i < k; i += 2)
    for (int64_t column = 0; column < kPanel; ++column)
      for (int64_t odd = 0; odd < 2; ++odd) *to++ = rows[static_cast<size_t>(column * k + i + odd)];
  return to;
}

// Blocks of fp4 to numbers, as fp4.h has them, by way of plain rows.
inline void decode_fp4_plainly(const uint8_t* powers, const void* words, int64_t blocks, uint16_t* to) {
  for (int64_t block = 0; block < blocks; ++block) {
    constexpr size_t kWordBytes = 2 * kPanel * kFp4BlockK / kFp4WordK;
    std::vector<uint8_t> panel(kPanel + kWordBytes);
    std::memcpy(panel.data(), powers + block * kPanel, kPanel);
    std::memcpy(panel.data() + kPanel, static_cast<const char*>(words) + static_cast<size_t>(block) * kWordBytes, kWordBytes);
    std::vector<uint16_t> rows(kPanel * kFp4BlockK);
    unpack_fp4_panel(panel.data(), kFp4BlockK, rows.data());
    to = put_pairs(rows, kFp4BlockK, to);
  }
}

// Likewise of int4, whose blocks have a group of their own each, or several have one.
inline void decode_int4_plainly(const uint32_t* scales, const void* words, int64_t k, int64_t group, uint16_t* to) {
  constexpr size_t kWords = kPanel * kInt4BlockK / 8;
  for (int64_t first = 0; first < k; first += kInt4BlockK) {
    std::vector<uint32_t> panel(kPanel + kWords);
    std::memcpy(panel.data(), scales + first / group * kPanel, kPanel * 4);
    std::memcpy(panel.data() + kPanel, static_cast<const uint32_t*>(words) + static_cast<size_t>(first / kInt4BlockK) * kWords, kWords * 4);
    std::vector<uint16_t> rows(kPanel * kInt4BlockK);
    unpack_int4_panel(panel.data(), kInt4BlockK, kInt4BlockK, rows.data());
    to = put_pairs(rows, kInt4BlockK, to);
  }
}

// Likewise of fp8 and of int8, whose blocks `unpack` takes to plain rows.
template <void (*unpack)(const void* panel, int64_t k, int64_t group, uint16_t* plain)>
void decode_bytes_plainly(const float* scales, const void* codes, int64_t k, int64_t group, uint16_t* to) {
  constexpr int64_t kBlock = kFp8BlockK;
  static_assert(kBlock == kInt8BlockK);
  constexpr size_t kCodeBytes = kPanel * kBlock;
  for (int64_t first = 0; first < k; first += kBlock) {
    std::vector<char> panel(4 * kPanel + kCodeBytes);
    std::memcpy(panel.data(), scales + first / group * kPanel, 4 * kPanel);
    std::memcpy(panel.data() + 4 * kPanel, static_cast<const char*>(codes) + first * kPanel, kCodeBytes);
    std::vector<uint16_t> rows(kCodeBytes);
    unpack(panel.data(), kBlock, kBlock, rows.data());
    to = put_pairs(rows, kBlock, to);
  }
}

// TransposeWordsFn, which packing takes from an instruction set.
inline void transpose_plainly(const void* from, int64_t from_stride, int64_t rows, int64_t words, void* to, int64_t to_stride) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < words; ++j)
      std::memcpy(static_cast<char*>(to) + j * to_stride + i * 4, static_cast<const char*>(from) + i * from_stride + j * 4, 4);
}

}  // namespace sgl_batch
