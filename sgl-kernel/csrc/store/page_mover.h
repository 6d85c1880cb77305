// Owns moving spans of layers between device pages and slots, with their checksums. It decides neither when nor what.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "geometry.h"
#include "medium.h"
#include "slot_table.h"

namespace sgl_batch {

// Device pages as they lie: page p of part k of layer l at parts[l * parts a layer + k] + p * its bytes.
struct DevicePages {
  std::vector<char*> parts;
  int64_t num_pages;
};

// Pieces of one call; kept by a thread from call to call.
struct MoverScratch {
  std::vector<iovec> pieces;
  std::vector<uint64_t> checksums;
};

class PageMover {
 public:
  PageMover(std::shared_ptr<SlotTable> table, std::shared_ptr<Medium> medium, DevicePages device);

  // Layers [first, last) of a page to a slot, or back. Throws CopyFault.
  void store(int64_t page, int64_t slot, int64_t first, int64_t last, MoverScratch& scratch) const;
  void load(int64_t slot, int64_t page, int64_t first, int64_t last, MoverScratch& scratch) const;

  int64_t num_pages() const { return device_.num_pages; }
  const Geometry& geometry() const { return table_->geometry(); }

 private:
  void lay_out(int64_t page, int64_t first, int64_t last, MoverScratch& scratch) const;
  char* part(int64_t page, int64_t layer, size_t index) const {
    const auto& bytes = geometry().part_bytes;
    return device_.parts[static_cast<size_t>(layer) * bytes.size() + index] + page * bytes[index];
  }
  bool checked() const { return geometry().checksum_offset >= 0; }
  uint64_t checksum(int64_t page, int64_t slot, int64_t layer) const;
  template <typename Each>
  void in_calls(int64_t first, int64_t last, const Each& each) const;

  std::shared_ptr<SlotTable> table_;
  std::shared_ptr<Medium> medium_;
  DevicePages device_;
};

}  // namespace sgl_batch
