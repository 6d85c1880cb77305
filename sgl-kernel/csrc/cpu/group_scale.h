// Owns finding the one scale of a group of an output's numbers: which numbers of bf16 are its multiples, rounded. The forms say
// which multiples there are, see int4.h, fp8.h and int8_groups.h.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sgl_batch {

constexpr int kMostGroup = 128;
constexpr int kSomeOfGroup = 32;  // most numbers that have no scale in common show it among the first

// The numbers by magnitude and sign.
struct ScaledGroup {
  int count;
  uint32_t magnitudes[kMostGroup];  // as f32
  uint32_t signs[kMostGroup];       // all bits, or none
  float times[kMostGroup];          // the multiples, without signs
};

// The scales, as the bits of f32, whose multiples are rounded to the numbers: at least `least`, at most `most`.
struct ScaleBounds {
  uint32_t least, most;
};

// Groups that are to have one scale, at least one.
struct ScaledGroups {
  ScaledGroup* begin() const { return groups; }
  ScaledGroup* end() const { return groups + count; }
  // Whether all hold.
  template <typename Holds>
  bool all(const Holds& holds) const {
    return std::all_of(begin(), end(), holds);
  }

  ScaledGroup* groups;
  int64_t count;
};

// Splits the numbers; returns the largest magnitude as bf16.
uint16_t split_group(const uint16_t* from, ScaledGroup& group);

// Of the first `count` numbers.
ScaleBounds scale_bounds(const ScaledGroup& group, int count);

// Whether the multiples, rounded to f32 and then to bf16, are the numbers.
bool scale_gives_all(const ScaledGroup& group, float scale);

// The scale that gives all numbers, or 0 where there is none: any of f32.
float scale_of(const ScaledGroups& groups);

}  // namespace sgl_batch
