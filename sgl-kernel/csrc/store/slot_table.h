// Owns which slots of a store are taken, by which ranks and in which state, in memory that the ranks share. It decides
// nothing about what is stored, and moves no data.
//
// What a rank holds is written down slot by slot and rank by rank (`refs`); all else (totals, free list, counts) follows
// from that and is made anew by whoever finds that a rank died while it held the lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "geometry.h"
#include "slot_memory.h"

namespace sgl_batch {

struct SlotCounts {
  int64_t free, writing, ready;
  int64_t recoveries;  // how often a rank died while it held the lock, and the table was made anew
};

class SlotTable {
 public:
  // Maps the table in `fd`, which it does not keep: `create` makes a new one there, otherwise it must be one with the
  // same geometry and number of ranks. Throws std::system_error or StoreFault.
  SlotTable(int fd, bool create, const std::vector<int64_t>& geometry, int num_ranks, int rank);

  // This process is the rank from now on. `start` tells it from a later process with the same number.
  void enter(int64_t pid, int64_t start);
  std::vector<std::pair<int64_t, int64_t>> occupants();  // by rank; 0 where nobody is

  std::vector<int64_t> take(int64_t count);  // WRITING, one reference; none at all where too few are free
  void complete(const int64_t* slots, int64_t count);
  void share(const int64_t* slots, int64_t count);
  void free(const int64_t* slots, int64_t count);

  // Drops all that `rank` holds, which is this one, with no copy under way, or one of which the caller knows that its
  // process has ended; returns how many slots became free. The rank may be entered again.
  int64_t reclaim(int rank);

  // A copy to WRITING slots of this rank, or to READY ones that nobody else holds, or from READY ones, begins: until its
  // end the rank can neither complete nor let go of them.
  void begin_copies(const int64_t* slots, int64_t count, bool to_slots);
  void end_copies(const int64_t* slots, int64_t count);

  SlotCounts counts();
  void describe(const int64_t* slots, int64_t count, int64_t* states, int64_t* references);
  void audit();  // counts everything again; throws std::logic_error where the table does not agree with itself

  // How often the slot was taken, so that data of an earlier use can be told.
  uint32_t generation(int64_t slot) const { return slots_[slot].generation; }
  const Geometry& geometry() const { return geometry_; }
  int rank() const { return rank_; }

 private:
  class Lock;

  uint32_t& refs(int64_t slot, int rank) const { return refs_[slot * num_ranks_ + rank]; }
  std::string named(int64_t slot) const;
  void check_range(int64_t slot) const;
  void set_state(SlotRecord& slot, SlotState state);
  void make_free(int64_t slot);
  void rebuild();
  template <typename Do, typename Undo>
  void all_or_none(const int64_t* slots, int64_t count, const Do& apply, const Undo& undo);

  Geometry geometry_;
  int num_ranks_, rank_;
  SlotMemory memory_;
  SlotHeader* header_;
  SlotRecord* slots_;
  uint32_t* refs_;
  // Copies under way in this process. Not shared: a rank's own reference keeps a slot alive for its copies.
  std::unique_ptr<std::atomic<uint32_t>[], decltype(&std::free)> copies_;
};

}  // namespace sgl_batch
