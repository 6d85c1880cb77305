// Owns how a slot's bytes are divided, as the caller chose it; it chooses nothing itself.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace sgl_batch {

constexpr int kMostParts = 8;

// A slot is slot_bytes at slot * slot_bytes; in it layer l begins at l * layer_bytes, and in that each part at its
// offset. What is neither part nor checksum is padding.
struct Geometry {
  int64_t num_slots, num_layers, layer_bytes, slot_bytes;
  int64_t checksum_offset;  // in a layer; -1 where there are none
  std::vector<int64_t> part_bytes, part_offsets;

  static constexpr int kNumbers = 5;  // before the parts

  // From num_slots, num_layers, layer_bytes, slot_bytes, checksum_offset, then bytes and offset of each part.
  static Geometry of(const std::vector<int64_t>& numbers) {
    const auto parts = static_cast<int64_t>(numbers.size()) - kNumbers;
    if (parts < 2 || parts > 2 * kMostParts || parts % 2 != 0)
      throw std::invalid_argument("a geometry of " + std::to_string(numbers.size()) + " numbers");
    Geometry g{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], {}, {}};
    int64_t end = 0;
    for (size_t i = kNumbers; i < numbers.size(); i += 2) {
      g.part_bytes.push_back(numbers[i]);
      g.part_offsets.push_back(numbers[i + 1]);
      if (numbers[i] <= 0 || numbers[i + 1] < end) throw std::invalid_argument("parts of a layer overlap or are empty");
      end = numbers[i] + numbers[i + 1];
    }
    if (g.checksum_offset >= 0 && g.checksum_offset < end) throw std::invalid_argument("the checksum lies in a part");
    if (g.checksum_offset >= 0) end = g.checksum_offset + 8;
    if (g.num_slots < 1 || g.num_slots >= (int64_t{1} << 31) || g.num_layers < 1 || g.layer_bytes < end ||
        g.slot_bytes / g.layer_bytes < g.num_layers)
      throw std::invalid_argument("slots are too many, or too small for their layers");
    return g;
  }

  int64_t offset(int64_t slot, int64_t layer) const { return slot * slot_bytes + layer * layer_bytes; }
};

}  // namespace sgl_batch
