// Owns the copies of pages: see page_mover.h.
#include "page_mover.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace sgl_batch {
namespace {

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 32)) * 0xd6e8feb86659fd93;
  return value ^ (value >> 29);
}

// Four running sums, so that no multiplication waits for the one before it.
uint64_t hash_of(const char* data, int64_t bytes, uint64_t seed) {
  uint64_t sums[4] = {seed, seed + kOdd, seed + 2 * kOdd, seed + 3 * kOdd};
  int64_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    uint64_t words[4];
    std::memcpy(words, data + at, 32);
    for (int i = 0; i < 4; ++i) {
      sums[i] = (sums[i] ^ words[i]) * kOdd;
      sums[i] ^= sums[i] >> 31;
    }
  }
  uint64_t result = mixed(static_cast<uint64_t>(bytes) + seed);
  for (; at < bytes; ++at) result = (result ^ static_cast<unsigned char>(data[at])) * kOdd;
  for (const uint64_t sum : sums) result = mixed(result ^ sum) + kOdd;
  return result;
}

}  // namespace

PageMover::PageMover(std::shared_ptr<SlotTable> table, std::shared_ptr<Medium> medium, DevicePages device)
    : table_(std::move(table)), medium_(std::move(medium)), device_(std::move(device)) {
  const auto needed = static_cast<size_t>(geometry().num_layers) * geometry().part_bytes.size();
  if (device_.parts.size() != needed)
    throw StoreFault(std::to_string(device_.parts.size()) + " parts of device pages; the store is for " + std::to_string(needed));
}

// The layers' parts, padding and checksums in the order in which they lie in a slot.
void PageMover::lay_out(int64_t page, int64_t first, int64_t last, MoverScratch& scratch) const {
  const Geometry& g = geometry();
  scratch.pieces.clear();
  scratch.checksums.resize(static_cast<size_t>(last - first));
  const auto add = [&](int64_t& at, int64_t offset, void* begin, int64_t bytes) {
    if (offset > at) scratch.pieces.push_back({nullptr, static_cast<size_t>(offset - at)});
    if (bytes > 0) scratch.pieces.push_back({begin, static_cast<size_t>(bytes)});
    at = offset + bytes;
  };
  for (int64_t layer = first; layer < last; ++layer) {
    int64_t at = 0;
    for (size_t k = 0; k < g.part_bytes.size(); ++k) add(at, g.part_offsets[k], part(page, layer, k), g.part_bytes[k]);
    if (checked()) add(at, g.checksum_offset, &scratch.checksums[static_cast<size_t>(layer - first)], 8);
    if (layer + 1 < last) add(at, g.layer_bytes, nullptr, 0);
  }
}

// Of the data, and of what they belong to: the slot, its use and the layer.
uint64_t PageMover::checksum(int64_t page, int64_t slot, int64_t layer) const {
  const Geometry& g = geometry();
  uint64_t sum = mixed(static_cast<uint64_t>(slot) * kOdd + static_cast<uint64_t>(layer)) ^ table_->generation(slot);
  for (size_t k = 0; k < g.part_bytes.size(); ++k) sum = hash_of(part(page, layer, k), g.part_bytes[k], sum);
  return sum;
}

// each(from, to) over as many layers as one call takes.
template <typename Each>
void PageMover::in_calls(int64_t first, int64_t last, const Each& each) const {
  const int64_t most = kMostPieces / (2 * static_cast<int64_t>(geometry().part_bytes.size()) + 3);
  for (; first < last; first += most) each(first, std::min(last, first + most));
}

void PageMover::store(int64_t page, int64_t slot, int64_t first, int64_t last, MoverScratch& scratch) const {
  in_calls(first, last, [&](int64_t from, int64_t to) {
    lay_out(page, from, to, scratch);
    for (int64_t layer = from; checked() && layer < to; ++layer)
      scratch.checksums[static_cast<size_t>(layer - from)] = checksum(page, slot, layer);
    medium_->write(geometry().offset(slot, from), scratch.pieces.data(), static_cast<int>(scratch.pieces.size()));
  });
}

void PageMover::load(int64_t slot, int64_t page, int64_t first, int64_t last, MoverScratch& scratch) const {
  in_calls(first, last, [&](int64_t from, int64_t to) {
    lay_out(page, from, to, scratch);
    medium_->read(geometry().offset(slot, from), scratch.pieces.data(), static_cast<int>(scratch.pieces.size()));
    for (int64_t layer = from; checked() && layer < to; ++layer)
      if (scratch.checksums[static_cast<size_t>(layer - from)] != checksum(page, slot, layer))
        throw CopyFault(0, "the checksum of layer " + std::to_string(layer) + " does not match: it was changed since it was "
                           "stored, or never stored");
  });
}

}  // namespace sgl_batch
