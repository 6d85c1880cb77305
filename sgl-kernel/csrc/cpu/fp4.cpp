#include "fp4.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "clones.h"

namespace sgl_batch {
namespace {

constexpr uint16_t kMagnitude = 0x7fff;
constexpr int kFractionBits = 7;
// Exponents of bf16 of the numbers 0.5 and 4, which lie so far from that of the power of two.
constexpr int kBelow = 1, kAbove = 2;
constexpr uint16_t kNumbers[8] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
constexpr int64_t kPair = 2;

// A column's 32 numbers to four bits each; returns the power of two plus kFp4Bias, or -1 where they are none of mxfp4. The largest
// number becomes 4 or 6, whatever it was.
SGL_BATCH_CLONES int codes_of(const uint16_t* from, uint16_t* codes) {
  uint16_t largest = 0;
  for (int i = 0; i < kFp4BlockK; ++i) largest = std::max<uint16_t>(largest, from[i] & kMagnitude);
  const int exponent = largest >> kFractionBits;
  const int power = largest == 0 ? kFp4Bias : exponent - kAbove;
  // All numbers are normal ones, and finite.
  if (power <= kBelow || power > kFp4MostPower) return -1;
  const auto half = static_cast<uint16_t>((power - kBelow) << kFractionBits);
  uint16_t wrong = 0;
  for (int i = 0; i < kFp4BlockK; ++i) {
    const uint16_t magnitude = from[i] & kMagnitude;
    // By half steps of the exponent: 0.5 is 0, 0.75 would be 1, 1 is 2, 1.5 is 3.
    const uint16_t above = magnitude - half, steps = above >> (kFractionBits - 1);
    const uint16_t zero = magnitude == 0 ? 0xffff : 0;
    const uint16_t own = steps == 0 ? 1 : steps;
    const uint16_t fits = (above & ((1 << (kFractionBits - 1)) - 1)) == 0 && steps < 8 && steps != 1 ? 0xffff : 0;
    wrong |= ~(zero | fits);
    codes[i] = (own & ~zero) | (from[i] >> 15 << 3);
  }
  return wrong == 0 ? power : -1;
}

// Numbers of blocks that are all normal and finite, two at a time; returns where the first other block is, or `blocks`.
SGL_BATCH_CLONES int64_t widen_blocks(const uint8_t* pairs, const uint8_t* powers, int64_t blocks, uint32_t* to) {
  for (int64_t block = 0; block < blocks; ++block, pairs += kFp4BlockK / 2, to += kFp4BlockK / 2) {
    if (powers[block] <= kBelow || powers[block] > kFp4MostPower) return block;
    const uint32_t half = static_cast<uint32_t>(powers[block] - kBelow) << kFractionBits;
    for (int i = 0; i < kFp4BlockK / 2; ++i) {
      const uint32_t even = pairs[i] & 7u, odd = pairs[i] >> 4 & 7u;
      // Those from 1 on lie half a step of the exponent apart.
      const uint32_t first = even == 0 ? 0 : half + (even << (kFractionBits - 1)) - (even == 1 ? 1u << (kFractionBits - 1) : 0);
      const uint32_t second = odd == 0 ? 0 : half + (odd << (kFractionBits - 1)) - (odd == 1 ? 1u << (kFractionBits - 1) : 0);
      to[i] = first | (pairs[i] & 8u) << 12 | (second | (pairs[i] & 128u) << 8) << 16;
    }
  }
  return blocks;
}

// Where the number of a column and of k within its word's four lies: the word's group, and the word.
struct Place {
  Place(int64_t column, int64_t k) : group(2 * (k / kPair) + column / (kPanel / kPair)), word(column % (kPanel / kPair) * kPair + k % kPair) {}
  int64_t group, word;
};

}  // namespace

void widen_mxfp4_row(const uint8_t* blocks, const uint8_t* powers, int64_t k, uint16_t* to) {
  for (int64_t left = k / kFp4BlockK; left > 0;) {
    const int64_t done = widen_blocks(blocks, powers, left, reinterpret_cast<uint32_t*>(to));
    left -= done, blocks += done * kFp4BlockK / 2, powers += done, to += done * kFp4BlockK;
    if (left == 0) return;
    const float scale = std::ldexp(1.0f, *powers - kFp4Bias);
    for (int64_t i = 0; i < kFp4BlockK; ++i) {
      const int code = blocks[i / 2] >> (4 * (i % 2)) & 15;
      to[i] = f32_to_bf16((code < 8 ? 1.0f : -1.0f) * bf16_to_f32(kNumbers[code % 8]) * scale);
    }
    --left, blocks += kFp4BlockK / 2, ++powers, to += kFp4BlockK;
  }
}

bool pack_fp4_panel(const uint16_t* plain, int64_t k, void* to) {
  auto* powers = static_cast<uint8_t*>(to);
  auto* words = reinterpret_cast<uint16_t*>(powers + fp4_power_bytes(k));
  uint16_t block[kFp4BlockK / kFp4WordK * kPanel];
  for (int64_t first = 0; first < k; first += kFp4BlockK, powers += kPanel, words += kFp4BlockK / kFp4WordK * kPanel) {
    std::memset(block, 0, sizeof(block));
    for (int64_t column = 0; column < kPanel; ++column) {
      uint16_t codes[kFp4BlockK];
      const int power = codes_of(plain + column * k + first, codes);
      if (power < 0) return false;
      powers[column] = static_cast<uint8_t>(power);
      for (int64_t i = 0; i < kFp4BlockK; ++i) {
        const Place place(column, i % kFp4WordK);
        block[i / kFp4WordK * kPanel + place.word] |= static_cast<uint16_t>(codes[i] << (4 * place.group));
      }
    }
    std::memcpy(words, block, sizeof(block));
  }
  return true;
}

void unpack_fp4_panel(const void* panel, int64_t k, uint16_t* plain) {
  const auto* powers = static_cast<const uint8_t*>(panel);
  const auto* words = reinterpret_cast<const uint16_t*>(powers + fp4_power_bytes(k));
  for (int64_t column = 0; column < kPanel; ++column)
    for (int64_t i = 0; i < k; ++i) {
      const Place place(column, i % kFp4WordK);
      const int code = words[i / kFp4WordK * kPanel + place.word] >> (4 * place.group) & 15;
      const int shift = (powers[i / kFp4BlockK * kPanel + column] - kFp4Bias) * (1 << kFractionBits);
      const int magnitude = code % 8 == 0 ? 0 : kNumbers[code % 8] + shift;
      plain[column * k + i] = static_cast<uint16_t>(magnitude | code >> 3 << 15);
    }
}

void decode_fp4_panel(const Isa& isa, const void* panel, int64_t k, void* to) {
  const auto* powers = static_cast<const uint8_t*>(panel);
  isa.decode_fp4(powers, powers + fp4_power_bytes(k), k / kFp4BlockK, static_cast<uint16_t*>(to));
}

}  // namespace sgl_batch
