#include "coded.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace sgl_batch {
namespace {

constexpr int64_t kExponents = 16;  // of four bits

uint32_t exponent(uint16_t number) { return (number >> 7) & 0xffu; }

// Those of one number where they belong, of the other one where they belong after a swap of bytes.
uint16_t sign_and_fraction(uint16_t one, uint16_t other) {
  const uint32_t swapped = (other & 0x7fu) << 8 | (other & 0x8000u) >> 8;
  return static_cast<uint16_t>((one & 0x807fu) | swapped);
}

// The first of the kExponents exponents that most numbers have.
uint32_t best_base(const uint16_t* numbers, int64_t count, int64_t* others) {
  std::array<int64_t, 256> found{};
  for (int64_t i = 0; i < count; ++i) ++found[exponent(numbers[i])];
  int64_t within = 0, most = -1;
  uint32_t base = 0;
  for (uint32_t last = 0; last < found.size(); ++last) {
    within += found[last] - (last >= kExponents ? found[last - kExponents] : 0);
    if (last >= kExponents - 1 && within > most) most = within, base = last - (kExponents - 1);
  }
  *others = count - most;
  return base;
}

}  // namespace

uint8_t code_panel(void* panel, int64_t k, void* scratch) {
  const int64_t count = kPanel * k;
  if (k == 0 || k % kCodedBlockK != 0) return 0;
  int64_t outside = 0;
  const uint32_t base = best_base(static_cast<const uint16_t*>(panel), count, &outside);
  const int64_t room = (2 * count - coded_bytes(k)) / static_cast<int64_t>(sizeof(Uncoded));
  if (outside >= room || count >= kNoPlace) return 0;
  std::memcpy(scratch, panel, static_cast<size_t>(2 * count));
  const auto* numbers = static_cast<const uint16_t*>(scratch);
  auto* words = static_cast<uint16_t*>(panel);
  const auto code = [&](uint16_t number) {
    const uint32_t above = exponent(number) - base;
    return above < kExponents ? above : 0;
  };
  for (int64_t block = 0; block < k / kCodedBlockK; ++block) {
    const uint16_t* from = numbers + block * kCodedBlockNumbers;
    uint16_t* to = words + block * 3 * kPanel;
    for (int64_t i = 0; i < kPanel; ++i) {
      to[i] = sign_and_fraction(from[i], from[kPanel + i]);
      to[kPanel + i] = sign_and_fraction(from[2 * kPanel + i], from[3 * kPanel + i]);
      uint32_t exponents = 0;
      for (int64_t j = 0; j < 4; ++j) exponents |= code(from[j * kPanel + i]) << 4 * j;
      to[2 * kPanel + i] = static_cast<uint16_t>(exponents);
    }
  }
  auto* list = const_cast<Uncoded*>(uncoded(panel, k));
  for (int64_t i = 0; i < count; ++i)
    if (exponent(numbers[i]) - base >= kExponents) *list++ = {static_cast<uint32_t>(i), numbers[i], 0};
  *list = {kNoPlace, 0, 0};
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
