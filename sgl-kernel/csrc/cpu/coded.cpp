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

inline void code_block(const uint16_t* numbers, uint32_t base, uint16_t* to) {
  for (int64_t i = 0; i < kPanel; ++i) to[i] = sign_and_fraction(numbers[i], numbers[kPanel + i]);
  for (int64_t i = 0; i < kPanel; ++i) to[kPanel + i] = sign_and_fraction(numbers[2 * kPanel + i], numbers[3 * kPanel + i]);
  // Of a number without a code the list has all.
  for (int64_t i = 0; i < kPanel; ++i) {
    uint32_t codes = 0;
    for (int64_t group = 0; group < 4; ++group) codes |= (above(numbers[group * kPanel + i], base) & 15u) << 4 * group;
    to[2 * kPanel + i] = static_cast<uint16_t>(codes);
  }
}

// Writes all codes, and the list of numbers without one if it has at most `most` of them. Returns how many there are, or more
// than `most` as soon as there are more.
SGL_BATCH_CLONES int64_t code_blocks(const uint16_t* numbers, int64_t blocks, uint32_t base, int64_t most, uint16_t* to, Uncoded* list) {
  int64_t listed = 0;
  for (int64_t block = 0; block < blocks; ++block, numbers += kCodedBlockNumbers, to += 3 * kPanel) {
    code_block(numbers, base, to);
    uint16_t here = 0;
    for (int64_t i = 0; i < kCodedBlockNumbers; ++i) here += above(numbers[i], base) >= kExponents;
    if (here == 0) continue;
    if (listed + here > most) return listed + here;
    for (int64_t i = 0; i < kCodedBlockNumbers; ++i)
      if (above(numbers[i], base) >= kExponents)
        list[listed++] = {static_cast<uint32_t>(block * kCodedBlockNumbers + i), numbers[i], 0};
  }
  list[listed] = {kNoPlace, 0, 0};
  return listed;
}

}  // namespace

uint8_t code_panel(const void* packed, int64_t k, void* to) {
  const int64_t count = kPanel * k;
  if (k == 0 || k % kCodedBlockK != 0 || count >= kNoPlace) return 0;
  const auto* numbers = static_cast<const uint16_t*>(packed);
  const int64_t room = (2 * count - coded_bytes(k)) / static_cast<int64_t>(sizeof(Uncoded)) - 1;
  const auto code = [&](uint32_t base, int64_t most) {
    auto* list = const_cast<Uncoded*>(uncoded(to, k));
    return code_blocks(numbers, k / kCodedBlockK, base, most, static_cast<uint16_t*>(to), list) <= most;
  };
  // Small numbers are the rare ones of trained and of random weights.
  uint32_t base = std::max<uint32_t>(largest_exponent(numbers, count), kExponents - 1) - (kExponents - 1);
  if (code(base, std::min(room, count / kFewWithoutCode))) return static_cast<uint8_t>(base + 1);
  base = best_base(numbers, count);
  return code(base, room) ? static_cast<uint8_t>(base + 1) : 0;
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
