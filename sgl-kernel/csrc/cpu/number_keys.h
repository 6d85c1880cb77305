// Owns whole numbers in the order of the numbers that they stand for: both zeros are equal and NaN is above all others.
#pragma once

#include <cstdint>

namespace sgl_batch {

constexpr int32_t kNanKey = 0x7fffffff;

// Of the bits of an f32.
[[gnu::always_inline]] inline int32_t key_of(uint32_t bits) {
  const auto value = static_cast<int32_t>((bits & 0x7fffffffu) == 0 ? 0u : bits);
  const int32_t key = value ^ ((value >> 31) & 0x7fffffff);
  return (bits & 0x7fffffffu) > 0x7f800000u ? kNanKey : key;
}

// The bits of an f32 with that key.
inline uint32_t bits_of_key(int32_t key) { return static_cast<uint32_t>(key ^ ((key >> 31) & 0x7fffffff)); }

}  // namespace sgl_batch
