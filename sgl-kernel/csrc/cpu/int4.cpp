#include "int4.h"

#include <algorithm>

#include "clones.h"
#include "group_scale.h"

namespace sgl_batch {
namespace {

constexpr uint32_t kScaleStep = ~kInt4Scale + 1;
// Numbers of other magnitudes would not be normal throughout.
constexpr uint16_t kLeast = (127 - 100) << 7, kMost = (127 + 100) << 7;
// How far from a whole multiple of the scale a number may lie: it and the largest, each at most 15 times the scale, are
// rounded by up to 2^-8 of themselves.
constexpr float kTolerance = 0.12f;
constexpr float kToWhole = 12582912.0f;  // 1.5 * 2^23: a number below it becomes whole when this is added and taken again
// How many times the scale the largest magnitude may be; the commonest first.
constexpr int kLargest[] = {8, 7, 9, 10, 11, 12, 13, 14, 15, 6, 5, 4, 3, 2, 1};
constexpr uint32_t kMostCode = 15;

// Whether numbers [first, last), times `factor`, are nearly whole, each; these are its multiples.
SGL_BATCH_CLONES bool nearly_whole(ScaledGroup& group, int first, int last, float factor) {
  const uint32_t most = __builtin_bit_cast(uint32_t, kTolerance);
  uint32_t wrong = 0;
  for (int i = first; i < last; ++i) {
    const float exact = __builtin_bit_cast(float, group.magnitudes[i]) * factor, whole = (exact + kToWhole) - kToWhole;
    const float lack = exact - whole;
    wrong |= (__builtin_bit_cast(uint32_t, lack) & 0x7fffffffu) > most ? 1u : 0u;
    group.times[i] = whole;
  }
  return wrong == 0;
}

// The zero point for these multiples, at most kMostCode; more where codes cannot hold them.
SGL_BATCH_CLONES uint32_t zero_of(const ScaledGroup& group) {
  int32_t below = 0, above = 0;
  for (int i = 0; i < group.count; ++i) {
    const auto times = static_cast<int32_t>(group.times[i]), sign = static_cast<int32_t>(group.signs[i]);
    below = std::max(below, times & sign);
    above = std::max(above, times & ~sign);
  }
  return static_cast<uint32_t>(below + above) <= kMostCode ? static_cast<uint32_t>(below) : kMostCode + 1;
}

// The scale between the bounds that gives all numbers, or 0.
float scale_between(const ScaledGroup& group, const ScaleBounds& bounds) {
  if (bounds.least > bounds.most) return 0.0f;
  const uint32_t middle = bounds.least + (bounds.most - bounds.least) / 2;
  const uint32_t nearest = (middle + kScaleStep / 2) & kInt4Scale;
  // A bound itself may give a number's neighbour.
  for (const uint32_t scale : {nearest, nearest + kScaleStep, nearest - kScaleStep})
    if (scale_gives_all(group, __builtin_bit_cast(float, scale))) return __builtin_bit_cast(float, scale);
  return 0.0f;
}

// Codes of an output's group, and its word; false where there are none.
bool codes_of(const uint16_t* from, ScaledGroup& group, uint32_t* codes, uint32_t& word) {
  const uint16_t largest = split_group(from, group);
  if (largest == 0) {
    std::fill_n(codes, group.count, 0u);
    word = __builtin_bit_cast(uint32_t, 1.0f);
    return true;
  }
  if (largest < kLeast || largest > kMost) return false;
  const float inverse = 1.0f / bf16_to_f32(largest);
  const int some = std::min(group.count, kSomeOfGroup);
  for (const int times : kLargest) {
    const float factor = static_cast<float>(times) * inverse;
    if (!nearly_whole(group, 0, some, factor) || !nearly_whole(group, some, group.count, factor)) continue;
    const uint32_t zero = zero_of(group);
    if (zero > kMostCode) continue;
    // Some have most multiples, each of which is rounded to its number between certain scales: then theirs does for all.
    float scale = scale_between(group, scale_bounds(group, some));
    if (scale == 0.0f && some < group.count) scale = scale_between(group, scale_bounds(group, group.count));
    if (scale == 0.0f) continue;
    for (int i = 0; i < group.count; ++i) {
      const auto whole = static_cast<uint32_t>(group.times[i]);
      codes[i] = group.signs[i] != 0 ? zero - whole : zero + whole;
    }
    word = __builtin_bit_cast(uint32_t, scale) | zero;
    return true;
  }
  return false;
}

// Where the numbers of a column lie: those of four k are in two words of 32 bits, of even k and of odd ones.
struct Place {
  explicit Place(int64_t column)
      : even(column % kHalf % kQuarter * 2),
        odd(even + 1),
        shift(static_cast<int>(column / kHalf * 4 + column % kHalf / kQuarter * 16)) {}

  static constexpr int64_t kHalf = kPanel / 2, kQuarter = kPanel / 4, kWords = kHalf;
  static constexpr int kNextPair = 8;  // how many bits higher the second pair of k lies
  int64_t even, odd;
  int shift;
};

SGL_BATCH_CLONES void widen_nibbles(const uint8_t* __restrict pairs, float lack, float scale, int64_t count, uint32_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t pair = pairs[i];
    const uint32_t even = number_to_bf16((static_cast<float>(pair & 15) - lack) * scale);
    to[i] = even | number_to_bf16((static_cast<float>(pair >> 4) - lack) * scale) << 16;
  }
}

template <typename Byte>
inline __attribute__((always_inline)) void widen(const Byte* __restrict integers, float lack, float scale, int64_t count,
                                                 uint16_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i)
    to[i] = static_cast<uint16_t>(number_to_bf16((static_cast<float>(static_cast<int32_t>(integers[i])) - lack) * scale));
}
SGL_BATCH_CLONES void widen_bytes(const uint8_t* integers, float lack, float scale, int64_t count, uint16_t* to) {
  widen(integers, lack, scale, count, to);
}
SGL_BATCH_CLONES void widen_bytes(const int8_t* integers, float lack, float scale, int64_t count, uint16_t* to) {
  widen(integers, lack, scale, count, to);
}

template <typename Byte>
void widen_row_of_bytes(const Byte* integers, const WideGroups& groups, int64_t k, uint16_t* to) {
  for (int64_t first = 0, i = 0; first < k; first += groups.group, ++i)
    widen_bytes(integers + first, groups.lacks[i], groups.scales[i], std::min(groups.group, k - first), to + first);
}

}  // namespace

void widen_nibble_row(const uint8_t* pairs, const WideGroups& groups, int64_t k, uint16_t* to) {
  for (int64_t first = 0, i = 0; first < k; first += groups.group, ++i)
    widen_nibbles(pairs + first / 2, groups.lacks[i], groups.scales[i], std::min(groups.group, k - first) / 2,
                  reinterpret_cast<uint32_t*>(to + first));
}

void widen_byte_row(const uint8_t* integers, const WideGroups& groups, int64_t k, uint16_t* to) {
  widen_row_of_bytes(integers, groups, k, to);
}
void widen_byte_row(const int8_t* integers, const WideGroups& groups, int64_t k, uint16_t* to) {
  widen_row_of_bytes(integers, groups, k, to);
}

bool pack_int4_panel(const uint16_t* plain, int64_t k, int64_t group, void* to) {
  auto* scales = static_cast<uint32_t*>(to);
  uint32_t* words = scales + k / group * kPanel;
  const int64_t words_of_group = group / kInt4WordK * Place::kWords;
  uint32_t block[kMostGroup / kInt4WordK * Place::kWords];
  uint32_t codes[kMostGroup];
  ScaledGroup own{.count = static_cast<int>(group), .magnitudes = {}, .signs = {}, .times = {}};
  for (int64_t first = 0; first < k; first += group, scales += kPanel, words += words_of_group) {
    std::fill_n(block, words_of_group, 0u);
    for (int64_t column = 0; column < kPanel; ++column) {
      if (!codes_of(plain + column * k + first, own, codes, scales[column])) return false;
      const Place place(column);
      for (int64_t i = 0; i < group; i += kInt4WordK) {
        uint32_t* const word = block + i / kInt4WordK * Place::kWords;
        word[place.even] |= (codes[i] | codes[i + 2] << Place::kNextPair) << place.shift;
        word[place.odd] |= (codes[i + 1] | codes[i + 3] << Place::kNextPair) << place.shift;
      }
    }
    std::copy_n(block, words_of_group, words);
  }
  return true;
}

void unpack_int4_panel(const void* panel, int64_t k, int64_t group, uint16_t* plain) {
  const auto* scales = static_cast<const uint32_t*>(panel);
  const uint32_t* words = scales + k / group * kPanel;
  for (int64_t column = 0; column < kPanel; ++column) {
    const Place place(column);
    for (int64_t i = 0; i < k; ++i) {
      const uint32_t* const four = words + i / kInt4WordK * Place::kWords;
      const int shift = place.shift + (i % kInt4WordK / 2 == 0 ? 0 : Place::kNextPair);
      const uint32_t code = four[i % 2 == 0 ? place.even : place.odd] >> shift & 15;
      const uint32_t word = scales[i / group * kPanel + column];
      const int times = static_cast<int>(code) - static_cast<int>(word & kInt4Zero);
      plain[column * k + i] = f32_to_bf16(static_cast<float>(times) * __builtin_bit_cast(float, word & kInt4Scale));
    }
  }
}

void decode_int4_panel(const Isa& isa, const void* panel, int64_t k, int64_t group, void* to) {
  const auto* scales = static_cast<const uint32_t*>(panel);
  isa.decode_int4(scales, scales + k / group * kPanel, k, group, static_cast<uint16_t*>(to));
}

}  // namespace sgl_batch
