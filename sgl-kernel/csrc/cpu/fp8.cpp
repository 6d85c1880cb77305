#include "fp8.h"

#include <algorithm>
#include <cstring>

#include "byte_pairs.h"
#include "clones.h"
#include "group_scale.h"

namespace sgl_batch {
namespace {

// A group with larger numbers, or with a largest number so small, would not have a normal scale, or not all numbers normal.
constexpr uint16_t kLeast = (127 - 100) << 7, kMost = (127 + 15) << 7;
// How far, as a part of itself, a number may lie from the nearest that has a code: it and the largest are rounded by up to 2^-8
// of themselves.
constexpr float kTolerance = 0x1.1p-7f;
constexpr int kFraction = 3;                     // bits of a code's
constexpr int kDropped = 23 - kFraction;         // of the fraction of f32
constexpr float kLeastNormal = 0x1p-6f;
constexpr float kToSteps = 0x1.8p14f;            // added and taken again, it leaves whole multiples of the least number, 2^-9
constexpr float kStepsPerOne = 0x1p9f;
// The largest magnitude without a scale, in 32; the commonest first.
constexpr int kLargest[] = {14, 15, 13, 12, 11, 10, 9, 8};
constexpr float kLargestStep = 32.0f;

// Whether numbers [first, last), times `factor`, are nearly ones that have a code, each; these are its multiples.
SGL_BATCH_CLONES bool nearly_coded(ScaledGroup& group, int first, int last, float factor) {
  uint32_t wrong = 0;
  for (int i = first; i < last; ++i) {
    const float exact = __builtin_bit_cast(float, group.magnitudes[i]) * factor;
    const uint32_t rounded = (__builtin_bit_cast(uint32_t, exact) + (1u << (kDropped - 1))) >> kDropped << kDropped;
    const float small = (exact + kToSteps) - kToSteps;
    const float nearest = exact < kLeastNormal ? small : __builtin_bit_cast(float, rounded);
    const float lack = exact < nearest ? nearest - exact : exact - nearest;
    wrong |= lack > nearest * kTolerance ? 1u : 0u;
    group.times[i] = nearest;
  }
  return wrong == 0;
}

// Codes of the multiples.
SGL_BATCH_CLONES void put_codes(const ScaledGroup& group, uint8_t* __restrict codes) {
  constexpr auto kLeastBits = __builtin_bit_cast(uint32_t, kLeastNormal), kToStepsBits = __builtin_bit_cast(uint32_t, kToSteps);
  const int count = group.count;
  for (int i = 0; i < count; ++i) {
    const auto bits = __builtin_bit_cast(uint32_t, group.times[i]);
    const uint32_t steps = __builtin_bit_cast(uint32_t, group.times[i] + kToSteps) - kToStepsBits;
    const uint32_t normal = (bits - (static_cast<uint32_t>(127 - kFp8Bias) << 23)) >> kDropped;
    const uint32_t is_small = bits < kLeastBits ? ~0u : 0u;  // of integers, so that a vector has both
    codes[i] = static_cast<uint8_t>((steps & is_small) | (normal & ~is_small) | (group.signs[i] & 0x80u));
  }
}

// Finds the multiples of one scale for all outputs, of whose numbers `largest` is the largest magnitude. Returns the scale, or 0
// where there is none.
float find_multiples(const ScaledGroups& outputs, uint16_t largest) {
  if (largest == 0) {
    for (ScaledGroup& group : outputs) std::fill_n(group.times, group.count, 0.0f);
    return 1.0f;
  }
  if (largest < kLeast || largest > kMost) return 0.0f;
  const float inverse = 1.0f / bf16_to_f32(largest);
  for (const int times : kLargest) {
    const float factor = static_cast<float>(times) * kLargestStep * inverse;
    const auto nearly = [factor](ScaledGroup& group) {
      const int some = std::min(group.count, kSomeOfGroup);
      return nearly_coded(group, 0, some, factor) && nearly_coded(group, some, group.count, factor);
    };
    if (!outputs.all(nearly)) continue;
    const float scale = scale_of(outputs);
    if (scale != 0.0f) return scale;
  }
  return 0.0f;
}

// Fills the scales of all columns, one for all where it does; false where there are none.
bool find_scales(ScaledGroup* groups, const uint16_t* largest, float* scales) {
  const float common = find_multiples({groups, kPanel}, *std::max_element(largest, largest + kPanel));
  if (common != 0.0f) {
    std::fill_n(scales, kPanel, common);
    return true;
  }
  for (int64_t column = 0; column < kPanel; ++column) {
    scales[column] = find_multiples({groups + column, 1}, largest[column]);
    if (scales[column] == 0.0f) return false;
  }
  return true;
}

float number_of(uint32_t code) {
  const uint32_t exponent = code >> kFraction & 15, fraction = code & 7;
  const float steps = static_cast<float>(exponent == 0 ? fraction : (8 + fraction) << (exponent - 1));
  return (code & 0x80u) != 0 ? -steps / kStepsPerOne : steps / kStepsPerOne;
}

// Numbers of e4m3 with one scale.
SGL_BATCH_CLONES void widen_codes(const uint8_t* __restrict codes, float scale, int64_t count, uint16_t* __restrict to) {
  constexpr uint32_t kNoNumber = 0x7f;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = codes[i], magnitude = code & 0x7fu;
    const float exact = __builtin_bit_cast(float, magnitude << kDropped) * kFp8ScaleUp * scale;
    const uint32_t rounded = number_to_bf16(exact);
    const uint32_t is_none = 0u - (magnitude == kNoNumber), number = (rounded & ~is_none) | (0x7fc0u & is_none);
    to[i] = static_cast<uint16_t>(number ^ (code & 0x80u) << 8);
  }
}

// Where the code of a column and of a pair's k lies among the 64 of its pair.
int64_t place_of(int64_t column, int64_t k) {
  constexpr int64_t kHalf = kPanel / 2, kRun = 8;
  const int64_t number = column % kHalf * 2 + k;
  return number / kRun * 2 * kRun + column / kHalf * kRun + number % kRun;
}

// Whether one of some codes is no number.
SGL_BATCH_CLONES bool has_no_number(const uint8_t* codes, int64_t count) {
  uint8_t found = 0;
  for (int64_t i = 0; i < count; ++i) found |= static_cast<uint8_t>((codes[i] & 0x7f) == 0x7f);
  return found != 0;
}

// As place_of has them.
constexpr PairColumns kColumnsOfEighths[] = {{0, 16}, {4, 20}, {8, 24}, {12, 28}};

}  // namespace

bool pack_fp8_codes(const uint8_t* codes, const BlockScales& scales, int64_t row, int64_t k, int64_t group, void* to) {
  auto* words = static_cast<float*>(to);
  auto* packed = reinterpret_cast<uint8_t*>(words + k / group * kPanel);
  if (has_no_number(codes, kPanel * k)) return false;
  for (int64_t first = 0; first < k; first += group)
    for (int64_t column = 0; column < kPanel; ++column) *words++ = scales.of(row + column, first) * kFp8ScaleUp;
  panel_of_bytes(codes, k, kColumnsOfEighths, packed);
  return true;
}

void widen_fp8_row(const uint8_t* codes, const float* scales, int64_t columns, int64_t k, uint16_t* to) {
  for (int64_t first = 0; first < k; first += columns, ++scales)
    widen_codes(codes + first, *scales, std::min(columns, k - first), to + first);
}

bool pack_fp8_panel(const uint16_t* plain, int64_t k, int64_t group, void* to) {
  auto* words = static_cast<float*>(to);
  auto* codes = reinterpret_cast<uint8_t*>(words + k / group * kPanel);
  ScaledGroup groups[kPanel];
  for (int64_t first = 0; first < k; first += group, words += kPanel, codes += group * kPanel) {
    uint16_t largest[kPanel];
    for (int64_t column = 0; column < kPanel; ++column) {
      groups[column].count = static_cast<int>(group);
      largest[column] = split_group(plain + column * k + first, groups[column]);
    }
    float scales[kPanel];
    if (!find_scales(groups, largest, scales)) return false;
    for (int64_t column = 0; column < kPanel; ++column) {
      words[column] = scales[column] * kFp8ScaleUp;
      uint8_t own[kMostGroup];
      put_codes(groups[column], own);
      for (int64_t i = 0; i < group; i += 2) std::memcpy(codes + i * kPanel + place_of(column, 0), own + i, 2);
    }
  }
  return true;
}

void unpack_fp8_panel(const void* panel, int64_t k, int64_t group, uint16_t* plain) {
  const auto* scales = static_cast<const float*>(panel);
  const auto* codes = reinterpret_cast<const uint8_t*>(scales + k / group * kPanel);
  for (int64_t column = 0; column < kPanel; ++column)
    for (int64_t i = 0; i < k; ++i) {
      const float number = number_of(codes[i / 2 * 2 * kPanel + place_of(column, i % 2)]) / kFp8ScaleUp;
      plain[column * k + i] = f32_to_bf16(number * scales[i / group * kPanel + column]);
    }
}

void decode_fp8_panel(const Isa& isa, const void* panel, int64_t k, int64_t group, void* to) {
  const auto* scales = static_cast<const float*>(panel);
  isa.decode_fp8(scales, scales + k / group * kPanel, k, group, static_cast<uint16_t*>(to));
}

}  // namespace sgl_batch
