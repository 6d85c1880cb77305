#include "group_scale.h"

#include <algorithm>

#include "clones.h"
#include "gemm.h"

namespace sgl_batch {
namespace {

constexpr uint32_t kHalfStep = 0x8000;  // of bf16, in bits of f32
constexpr uint32_t kInfinity = 0x7f800000;

// The scale near the middle of the bounds that gives all numbers, or 0. There may be one alone, and bounds are rounded.
float scale_between(const ScaledGroups& groups, const ScaleBounds& bounds) {
  constexpr int64_t kMostSteps = 8;
  const auto width = static_cast<int64_t>(bounds.most) - static_cast<int64_t>(bounds.least);
  if (width < -kMostSteps) return 0.0f;
  const int64_t middle = bounds.least + width / 2;
  for (int64_t step = 0; step <= kMostSteps; ++step)
    for (const int64_t bits : {middle + step, middle - step}) {
      const float scale = __builtin_bit_cast(float, static_cast<uint32_t>(bits));
      if (groups.all([scale](const ScaledGroup& group) { return scale_gives_all(group, scale); })) return scale;
    }
  return 0.0f;
}

}  // namespace

SGL_BATCH_CLONES uint16_t split_group(const uint16_t* from, ScaledGroup& group) {
  uint32_t largest = 0;
  for (int i = 0; i < group.count; ++i) {
    const uint32_t magnitude = from[i] & 0x7fffu;
    group.magnitudes[i] = magnitude << 16;
    group.signs[i] = 0u - (from[i] >> 15);
    largest = std::max(largest, magnitude);
  }
  return static_cast<uint16_t>(largest);
}

SGL_BATCH_CLONES ScaleBounds scale_bounds(const ScaledGroup& group, int count) {
  uint32_t least = 0, most = kInfinity;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = group.magnitudes[i];
    const float times = group.times[i];
    // Of no times the scale any will do, if the number is zero, and none otherwise.
    const bool is_zero = times == 0.0f;
    const auto below = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude - kHalfStep) / times);
    const auto above = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude + kHalfStep) / times);
    least = std::max(least, is_zero ? (magnitude == 0 ? 0 : kInfinity) : below);
    most = std::min(most, is_zero ? kInfinity : above);
  }
  return {least, most};
}

SGL_BATCH_CLONES bool scale_gives_all(const ScaledGroup& group, float scale) {
  uint32_t wrong = 0;
  for (int i = 0; i < group.count; ++i) wrong |= number_to_bf16(group.times[i] * scale) << 16 ^ group.magnitudes[i];
  return wrong == 0;
}

float scale_of(const ScaledGroups& groups) {
  ScaleBounds bounds = scale_bounds(*groups.begin(), groups.begin()->count);
  // Most often the first group has so many multiples that its scale does for all.
  const float first = scale_between({groups.begin(), 1}, bounds);
  if (first == 0.0f) return 0.0f;
  if (groups.all([first](const ScaledGroup& group) { return scale_gives_all(group, first); })) return first;
  for (const ScaledGroup& group : groups) {
    const ScaleBounds own = scale_bounds(group, group.count);
    bounds = {std::max(bounds.least, own.least), std::min(bounds.most, own.most)};
  }
  return scale_between(groups, bounds);
}

}  // namespace sgl_batch
