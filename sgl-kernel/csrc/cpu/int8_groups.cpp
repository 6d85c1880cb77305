#include "int8_groups.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <span>
#include <vector>

#include "byte_pairs.h"
#include "clones.h"
#include "group_scale.h"

namespace sgl_batch {
namespace {

constexpr int kMostTimes = 128;  // with a sign; 127 without
constexpr uint32_t kHalfStep = 0x8000;  // of bf16, in bits of f32
constexpr float kSlack = 0x1p-20f;  // as bounds of scales are rounded, and multiples that are computed from them
constexpr float kToWhole = 12582912.0f;  // 1.5 * 2^23: a number below it becomes whole when this is added and taken again
// Numbers of other magnitudes would not be normal throughout.
constexpr uint16_t kLeast = (127 - 100) << 7, kMost = (127 + 100) << 7;

// Which of the numbers can be how many times a scale between the bounds: none of them any, or some several.
constexpr uint32_t kNone = 1, kSeveral = 2;

SGL_BATCH_CLONES uint16_t largest_of(const uint16_t* row, int64_t k) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max<uint16_t>(largest, row[i] & 0x7fffu);
  return largest;
}

// All bits, or none: without a choice of ways, so that a loop becomes vectors.
inline __attribute__((always_inline)) uint32_t if_negative(int32_t number) { return static_cast<uint32_t>(number >> 31); }

// Numbers that can be one multiple alone narrow `found`. So the small ones are known first, which a wrong scale does not pass, and
// with a narrower one the larger ones.
SGL_BATCH_CLONES uint32_t narrow(const ScaledGroup& group, int first, int last, ScaleBounds bounds, ScaleBounds& found) {
  const float inverse_most = (1.0f - kSlack) / __builtin_bit_cast(float, bounds.most);
  const float inverse_least = (1.0f + kSlack) / __builtin_bit_cast(float, bounds.least);
  uint32_t none = 0, several = 0, least = found.least, most = found.most;
  for (int i = first; i < last; ++i) {
    const uint32_t magnitude = group.magnitudes[i], counts = if_negative(-static_cast<int32_t>(magnitude));
    const float below = __builtin_bit_cast(float, magnitude - (kHalfStep & counts));
    const float above = __builtin_bit_cast(float, magnitude + kHalfStep);
    const int32_t fewest = static_cast<int32_t>(below * inverse_most) + 1, highest = static_cast<int32_t>(above * inverse_least);
    const uint32_t too_few = if_negative(highest - fewest), open = if_negative(fewest - highest);
    const uint32_t known = counts & ~open & ~too_few;
    none |= counts & (too_few | if_negative(kMostTimes - fewest));
    several |= counts & open;
    const float share = 1.0f / static_cast<float>(fewest);
    const auto lower = __builtin_bit_cast(uint32_t, below * share), upper = __builtin_bit_cast(uint32_t, above * share);
    least = std::max(least, lower & known);
    most = std::min(most, upper | ~known);
  }
  found = {least, most};
  return (none != 0 ? kNone : 0) | (several != 0 ? kSeveral : 0);
}

// Finds the nearest multiples; false where a byte does not hold them.
SGL_BATCH_CLONES bool put_nearest(ScaledGroup& group, float inverse) {
  int32_t wrong = 0;
  for (int i = 0; i < group.count; ++i) {
    const float times = (__builtin_bit_cast(float, group.magnitudes[i]) * inverse + kToWhole) - kToWhole;
    group.times[i] = times;
    wrong |= static_cast<int32_t>(times) + static_cast<int32_t>(group.signs[i]) > kMostTimes - 1 ? 1 : 0;  // a sign is -1
  }
  return wrong == 0;
}

// So many quarters from the least scale to the most.
float between(const ScaleBounds& bounds, uint32_t quarters) {
  return __builtin_bit_cast(float, bounds.least + (bounds.most - bounds.least) / 4 * quarters);
}
float middle_of(const ScaleBounds& bounds) { return between(bounds, 2); }

bool put_nearest(const ScaledGroups& groups, float scale) {
  const float inverse = 1.0f / scale;
  return groups.all([inverse](ScaledGroup& group) { return put_nearest(group, inverse); });
}

// Whether one scale gives all numbers, which are then its nearest multiples.
bool gives_all(const ScaledGroups& groups, float scale) {
  return put_nearest(groups, scale) && groups.all([scale](const ScaledGroup& group) { return scale_gives_all(group, scale); });
}

// Finds the multiples of a scale between the bounds, and narrows these. Returns the scale, or 0 where there is none.
float find_multiples(const ScaledGroups& groups, ScaleBounds& bounds) {
  constexpr int kMostRounds = 8;
  bool is_narrower = true;
  for (int round = 0; round < kMostRounds && is_narrower; ++round) {
    ScaleBounds found = bounds;
    uint32_t all = 0;
    for (const ScaledGroup& group : groups) {
      all |= narrow(group, 0, round == 0 ? std::min(group.count, kSomeOfGroup) : group.count, bounds, found);
      if ((all & kNone) != 0) return 0.0f;
    }
    is_narrower = round == 0 || found.least > bounds.least || found.most < bounds.most;
    bounds = {std::min(found.least, found.most), std::max(found.least, found.most)};
    if (const float middle = middle_of(bounds); round > 0 && gives_all(groups, middle)) return middle;
    if ((all & kSeveral) == 0 && round > 0) break;
  }
  // A number that can be several multiples may be one of none of the scales in between, and bounds are rounded.
  for (const uint32_t quarters : {0u, 4u, 2u, 1u, 3u}) {
    const float scale = put_nearest(groups, between(bounds, quarters)) ? scale_of(groups) : 0.0f;
    if (scale != 0.0f) return scale;
  }
  return 0.0f;
}

SGL_BATCH_CLONES void put_integers(const ScaledGroup& group, int8_t* __restrict to) {
  const int count = group.count;
  for (int i = 0; i < count; ++i) {
    const auto times = static_cast<int32_t>(group.times[i]), sign = static_cast<int32_t>(group.signs[i]);
    to[i] = static_cast<int8_t>((times ^ sign) - sign);
  }
}

// Where `largest` is so many times the scale.
ScaleBounds bounds_of(uint16_t largest, int times) {
  const auto over = [times](uint32_t bits) {
    return __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, bits) / static_cast<float>(times));
  };
  const uint32_t magnitude = static_cast<uint32_t>(largest) << 16;
  return {over(magnitude - kHalfStep), over(magnitude + kHalfStep)};
}

bool may_have_scale(uint16_t largest) { return largest >= kLeast && largest <= kMost; }

// The scale of which the largest number is one of `likely` times, or of `tries_all` any; 0 where there is none. Leaves its bounds.
float find_scale(const ScaledGroups& groups, uint16_t largest, std::span<const float> likely, bool tries_all, ScaleBounds& bounds) {
  std::bitset<kMostTimes + 1> tried;
  const auto scale_with = [&](int times) {
    if (times < 1 || times > kMostTimes || tried[static_cast<size_t>(times)]) return 0.0f;
    tried.set(static_cast<size_t>(times));
    bounds = bounds_of(largest, times);
    return find_multiples(groups, bounds);
  };
  for (const float times : likely)
    if (const float scale = scale_with(static_cast<int>(times + 0.5f)); scale != 0.0f) return scale;
  for (int times = tries_all ? kMostTimes : 0; times > 0; --times)
    if (const float scale = scale_with(times); scale != 0.0f) return scale;
  return 0.0f;
}

// A column's groups one after the other. Most often all have one scale, of which more and more is known, and whose largest multiple
// in the whole column is 127, or each has one, whose largest multiple in the group is that.
class ColumnScales {
 public:
  ColumnScales(const uint16_t* column, int64_t k) : largest_(largest_of(column, k)) {}

  // Finds a group's multiples. Returns their scale, or 0 where there is none.
  float next(ScaledGroup& group, const uint16_t* from) {
    const uint16_t largest = split_group(from, group);
    if (largest == 0) {
      std::fill_n(group.times, group.count, 0.0f);
      return 1.0f;
    }
    if (!may_have_scale(largest)) return 0.0f;
    const ScaledGroups one{&group, 1};
    if (last_ != 0.0f && gives_all(one, last_)) return last_;
    const float share = bf16_to_f32(largest) / bf16_to_f32(largest_);
    const float most = kMostTimes - 1, by_last = last_ == 0.0f ? most : bf16_to_f32(largest) / last_;
    const std::array likely{most, by_last, most * share, most + 1.0f};
    ScaleBounds bounds{};
    last_ = find_scale(one, largest, likely, true, bounds);
    const ScaleBounds both{std::max(bounds.least, of_all_.least), std::min(bounds.most, of_all_.most)};
    of_all_ = both.least < both.most ? both : bounds;
    if (const float middle = middle_of(of_all_); last_ != 0.0f && scale_gives_all(group, middle)) last_ = middle;
    return last_;
  }

 private:
  const uint16_t largest_;
  float last_ = 0.0f;
  ScaleBounds of_all_{0, ~0u};
};

// One after the other.
constexpr PairColumns kColumnsOfEighths[] = {{0, 4}, {8, 12}, {16, 20}, {24, 28}};

}  // namespace

void pack_int8_codes(const int8_t* integers, const BlockScales& scales, int64_t row, int64_t k, int64_t group, void* to) {
  auto* words = static_cast<float*>(to);
  auto* codes = reinterpret_cast<uint8_t*>(words + k / group * kPanel);
  for (int64_t first = 0; first < k; first += group)
    for (int64_t column = 0; column < kPanel; ++column) *words++ = scales.of(row + column, first);
  panel_of_bytes(reinterpret_cast<const uint8_t*>(integers), k, kColumnsOfEighths, codes);
}

bool pack_int8_panel(const uint16_t* plain, int64_t k, int64_t group, void* to) {
  auto* scales = static_cast<float*>(to);
  auto* codes = reinterpret_cast<int8_t*>(scales + k / group * kPanel);
  ScaledGroup own{.count = static_cast<int>(group), .magnitudes = {}, .signs = {}, .times = {}};
  int8_t integers[kMostGroup];
  for (int64_t column = 0; column < kPanel; ++column) {
    const uint16_t* const from = plain + column * k;
    ColumnScales column_scales(from, k);
    for (int64_t first = 0; first < k; first += group) {
      const float scale = column_scales.next(own, from + first);
      if (scale == 0.0f) return false;
      put_integers(own, integers);
      scales[first / group * kPanel + column] = scale;
      int8_t* const place = codes + first * kPanel + column * 2;
      for (int64_t i = 0; i < group; i += 2) std::memcpy(place + i * kPanel, integers + i, 2);
    }
  }
  return true;
}

void unpack_int8_panel(const void* panel, int64_t k, int64_t group, uint16_t* plain) {
  const auto* scales = static_cast<const float*>(panel);
  const auto* codes = reinterpret_cast<const int8_t*>(scales + k / group * kPanel);
  for (int64_t column = 0; column < kPanel; ++column)
    for (int64_t i = 0; i < k; ++i) {
      const auto integer = static_cast<float>(codes[i / 2 * 2 * kPanel + column * 2 + i % 2]);
      plain[column * k + i] = f32_to_bf16(integer * scales[i / group * kPanel + column]);
    }
}

void decode_int8_panel(const Isa& isa, const void* panel, int64_t k, int64_t group, void* to) {
  const auto* scales = static_cast<const float*>(panel);
  isa.decode_int8_groups(scales, scales + k / group * kPanel, k, group, static_cast<uint16_t*>(to));
}

float integers_of_row(const uint16_t* row, int64_t k, int8_t* to) {
  constexpr std::array<float, 2> kLikely{kMostTimes - 1, kMostTimes};
  const uint16_t largest = largest_of(row, k);
  if (!may_have_scale(largest)) return 0.0f;
  const auto find = [&](ScaledGroups groups) {
    for (ScaledGroup& group : groups) {
      const int64_t first = (&group - groups.groups) * kMostGroup;
      group.count = static_cast<int>(std::min<int64_t>(kMostGroup, k - first));
      split_group(row + first, group);
    }
    const float usual = bf16_to_f32(largest) / (kMostTimes - 1);
    ScaleBounds bounds{};
    return gives_all(groups, usual) ? usual : find_scale(groups, largest, kLikely, false, bounds);
  };
  ScaledGroup begin;
  if (find({&begin, 1}) == 0.0f) return 0.0f;  // as most rows of other numbers
  std::vector<ScaledGroup> groups(static_cast<size_t>((k + kMostGroup - 1) / kMostGroup));
  const float scale = find({groups.data(), static_cast<int64_t>(groups.size())});
  if (scale == 0.0f) return 0.0f;
  for (const ScaledGroup& group : groups) {
    put_integers(group, to);
    to += group.count;
  }
  return scale;
}

}  // namespace sgl_batch
