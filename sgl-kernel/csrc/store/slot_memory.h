// Owns what of a table of slots lies in memory that ranks share, and that memory; its meaning is slot_table.h's.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "geometry.h"

namespace sgl_batch {

constexpr int kMostStoreRanks = 64;

enum class SlotState : uint32_t { kFree, kWriting, kReady };

// A mistake of the caller: which slot, what it is, what it had to be. Nothing has changed.
struct StoreFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct SlotRecord {
  uint32_t references, next_free, generation;
  SlotState state;
};

struct SlotHeader {
  static constexpr int kGeometryNumbers = Geometry::kNumbers + 2 * kMostParts;

  uint64_t magic;
  int64_t geometry[kGeometryNumbers];
  int64_t num_ranks;
  pthread_mutex_t mutex;  // of all processes, and handed on when one dies with it
  int64_t used;           // slots [used, num_slots) were never taken and are free
  int64_t num_listed, num_writing, num_ready;
  int64_t recoveries;
  uint32_t first_free;
  struct {
    int64_t pid, start;
  } occupants[kMostStoreRanks];
};

// The mapped table: a header, a record for each slot, and for each slot the references of each rank.
class SlotMemory {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // Maps `fd`, which is not kept: `create` makes a table there, otherwise it must hold one of the same geometry and
  // number of ranks. Throws std::system_error or StoreFault.
  SlotMemory(int fd, bool create, const std::vector<int64_t>& geometry, int num_slots, int num_ranks);
  ~SlotMemory();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  SlotHeader& header() const { return *static_cast<SlotHeader*>(memory_); }
  SlotRecord* slots() const;
  uint32_t* refs() const { return reinterpret_cast<uint32_t*>(slots() + num_slots_); }  // [slots, ranks]

 private:
  void begin(const int64_t* geometry, int num_ranks);

  size_t num_slots_, bytes_;
  void* memory_ = nullptr;
};

}  // namespace sgl_batch
