#include "coded.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "clones.h"

namespace sgl_batch {
namespace {

constexpr uint32_t kExponents = 16;  // of four bits
constexpr int64_t kFewWithoutCode = 1024;  // one number of so many

uint32_t exponent(uint16_t number) { return (number >> 7) & 0xffu; }

// Those of one number where they belong, of the other one where they belong after a swap of bytes.
uint16_t sign_and_fraction(uint16_t one, uint16_t other) {
  const uint32_t swapped = (other & 0x7fu) << 8 | (other & 0x8000u) >> 8;
  return static_cast<uint16_t>((one & 0x807fu) | swapped);
}

uint16_t above(uint16_t number, uint32_t base) { return static_cast<uint16_t>(exponent(number) - base); }

SGL_BATCH_CLONES uint16_t largest_exponent(const uint16_t* numbers, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max<uint16_t>(largest, (numbers[i] >> 7) & 0xff);
  return largest;
}

SGL_BATCH_CLONES int64_t numbers_without_code(const uint16_t* numbers, int64_t count, uint32_t base) {
  int64_t found = 0;
  for (int64_t block = 0; block < count; block += kCodedBlockNumbers) {
    uint16_t here = 0;
    for (int64_t i = 0; i < kCodedBlockNumbers; ++i) here += above(numbers[block + i], base) >= kExponents;
    found += here;
  }
  return found;
}

// The first of the kExponents exponents that most numbers have.
uint32_t best_base(const uint16_t* numbers, int64_t count) {
  std::array<int64_t, 256> found{};
  for (int64_t i = 0; i < count; ++i) ++found[exponent(numbers[i])];
  int64_t within = 0, most = -1;
  uint32_t base = 0;
  for (uint32_t last = 0; last < found.size(); ++last) {
    within += found[last] - (last >= kExponents ? found[last - kExponents] : 0);
    if (last >= kExponents - 1 && within > most) most = within, base = last - (kExponents - 1);
  }
  return base;
}

SGL_BATCH_CLONES void code_blocks(const uint16_t* numbers, int64_t blocks, uint32_t base, uint16_t* to) {
  for (int64_t block = 0; block < blocks; ++block, numbers += kCodedBlockNumbers, to += 3 * kPanel) {
    for (int64_t i = 0; i < kPanel; ++i) to[i] = sign_and_fraction(numbers[i], numbers[kPanel + i]);
    for (int64_t i = 0; i < kPanel; ++i)
      to[kPanel + i] = sign_and_fraction(numbers[2 * kPanel + i], numbers[3 * kPanel + i]);
    // Of a number without a code the list has all.
    for (int64_t i = 0; i < kPanel; ++i) {
      uint32_t codes = 0;
      for (int64_t group = 0; group < 4; ++group) codes |= (above(numbers[group * kPanel + i], base) & 15u) << 4 * group;
      to[2 * kPanel + i] = static_cast<uint16_t>(codes);
    }
  }
}

void list_numbers_without_code(const uint16_t* numbers, int64_t count, uint32_t base, Uncoded* list) {
  for (int64_t block = 0; block < count; block += kCodedBlockNumbers) {
    if (numbers_without_code(numbers + block, kCodedBlockNumbers, base) == 0) continue;
    for (int64_t i = block; i < block + kCodedBlockNumbers; ++i)
      if (above(numbers[i], base) >= kExponents) *list++ = {static_cast<uint32_t>(i), numbers[i], 0};
  }
  *list = {kNoPlace, 0, 0};
}

}  // namespace

uint8_t code_panel(void* panel, int64_t k, void* scratch) {
  const int64_t count = kPanel * k;
  if (k == 0 || k % kCodedBlockK != 0 || count >= kNoPlace) return 0;
  const auto* own = static_cast<const uint16_t*>(panel);
  // Small numbers are the rare ones of trained and of random weights.
  uint32_t base = std::max<uint32_t>(largest_exponent(own, count), kExponents - 1) - (kExponents - 1);
  int64_t outside = numbers_without_code(own, count, base);
  if (outside > count / kFewWithoutCode) {
    base = best_base(own, count);
    outside = numbers_without_code(own, count, base);
  }
  if (outside >= (2 * count - coded_bytes(k)) / static_cast<int64_t>(sizeof(Uncoded))) return 0;
  std::memcpy(scratch, panel, static_cast<size_t>(2 * count));
  const auto* numbers = static_cast<const uint16_t*>(scratch);
  code_blocks(numbers, k / kCodedBlockK, base, static_cast<uint16_t*>(panel));
  list_numbers_without_code(numbers, count, base, const_cast<Uncoded*>(uncoded(panel, k)));
  return static_cast<uint8_t>(base + 1);
}

void uncode_panel(void* panel, int64_t k, uint8_t mark, void* scratch) {
  if (mark == 0) return;
  decode_panel(isa(), panel, k, mark, scratch);
  std::memcpy(panel, scratch, static_cast<size_t>(2 * kPanel * k));
}

void decode_panel(const Isa& isa, const void* panel, int64_t k, uint8_t mark, void* to) {
  auto* numbers = static_cast<uint16_t*>(to);
  isa.decode(panel, k / kCodedBlockK, mark - 1u, numbers);
  for (const Uncoded* one = uncoded(panel, k); one->place != kNoPlace; ++one) numbers[one->place] = one->number;
}

}  // namespace sgl_batch
