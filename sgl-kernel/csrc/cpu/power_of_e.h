// Owns e to the power of a number without a branch, so that it can be compiled for vectors (clones.h).
#pragma once

#include <bit>
#include <cstdint>

namespace sgl_batch {

// e to the power of x, of at most 0, with a relative error of 2e-7; 0 below -87, and NaN of NaN.
[[gnu::always_inline]] inline float exp_of(float x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: in a sum with it, the lowest bits are a whole number
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const float shifted = x * 1.44269504f + kWhole, whole = shifted - kWhole;
  const float r = (x - whole * kLn2High) - whole * kLn2Low;  // from -ln(2) / 2 to ln(2) / 2
  float power = 1.0f / 5040;
  power = power * r + 1.0f / 720;
  power = power * r + 1.0f / 120;
  power = power * r + 1.0f / 24;
  power = power * r + 1.0f / 6;
  power = power * r + 0.5f;
  power = power * r + 1.0f;
  power = power * r + 1.0f;
  constexpr int32_t kLeast = 0x42AE0000, kInfinity = 0x7F800000;  // kLeast: the bits of 87
  constexpr uint32_t kNan = 0x7FC00000;
  const int32_t size = std::bit_cast<int32_t>(x) & 0x7FFFFFFF;
  const uint32_t bits = std::bit_cast<uint32_t>(power) + (std::bit_cast<uint32_t>(shifted) << 23);
  const auto within = 0u - static_cast<uint32_t>(size <= kLeast), no_number = 0u - static_cast<uint32_t>(size > kInfinity);
  return std::bit_cast<float>((bits & within) | (kNan & no_number));
}

}  // namespace sgl_batch
