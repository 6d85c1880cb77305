// Owns the shared table of slots: see slot_table.h.
#include "slot_table.h"

#include <pthread.h>

#include <cerrno>
#include <system_error>

namespace sgl_batch {
namespace {

constexpr uint32_t kNone = SlotMemory::kNone;

const char* name_of(SlotState state) {
  return state == SlotState::kFree ? "FREE" : state == SlotState::kWriting ? "WRITING" : "READY";
}

// What follows must not be seen by another process before what precedes: the owner can die in between. The hardware
// keeps the order of one thread's stores for whoever takes the lock after it.
void keep_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

int checked_rank(int rank, int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMostStoreRanks || rank < 0 || rank >= num_ranks)
    throw StoreFault("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + "; at most " +
                     std::to_string(kMostStoreRanks) + " ranks share a store");
  return rank;
}

}  // namespace

class SlotTable::Lock {
 public:
  explicit Lock(SlotTable& table) : mutex_(&table.header_->mutex) {
    const int error = pthread_mutex_lock(mutex_);
    if (error != 0 && error != EOWNERDEAD)
      throw std::system_error(error, std::generic_category(), "locking the table of slots");
    if (error == 0) return;
    table.rebuild();
    ++table.header_->recoveries;
    pthread_mutex_consistent(mutex_);
  }
  ~Lock() { pthread_mutex_unlock(mutex_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  pthread_mutex_t* mutex_;
};

SlotTable::SlotTable(int fd, bool create, const std::vector<int64_t>& geometry, int num_ranks, int rank)
    : geometry_(Geometry::of(geometry)),
      num_ranks_(num_ranks),
      rank_(checked_rank(rank, num_ranks)),
      memory_(fd, create, geometry, static_cast<int>(geometry_.num_slots), num_ranks),
      header_(&memory_.header()),
      slots_(memory_.slots()),
      refs_(memory_.refs()),
      copies_(nullptr, &std::free) {
  // Zero, and claimed only where it is written.
  using Count = std::atomic<uint32_t>;
  copies_.reset(static_cast<Count*>(std::calloc(static_cast<size_t>(geometry_.num_slots), sizeof(Count))));
  if (copies_ == nullptr) throw std::bad_alloc();
}

void SlotTable::enter(int64_t pid, int64_t start) {
  const Lock lock(*this);
  auto& own = header_->occupants[rank_];
  if (own.pid != 0)
    throw StoreFault("rank " + std::to_string(rank_) + " is process " + std::to_string(own.pid) + " already");
  own = {pid, start};
}

std::vector<std::pair<int64_t, int64_t>> SlotTable::occupants() {
  const Lock lock(*this);
  std::vector<std::pair<int64_t, int64_t>> found;
  for (int rank = 0; rank < num_ranks_; ++rank)
    found.emplace_back(header_->occupants[rank].pid, header_->occupants[rank].start);
  return found;
}

std::string SlotTable::named(int64_t slot) const {
  const SlotRecord& s = slots_[slot];
  return "slot " + std::to_string(slot) + " (" + name_of(s.state) + ", " + std::to_string(s.references) +
         " references, " + std::to_string(refs(slot, rank_)) + " of them this rank's)";
}

void SlotTable::check_range(int64_t slot) const {
  if (slot < 0 || slot >= geometry_.num_slots)
    throw StoreFault("slot " + std::to_string(slot) + " of " + std::to_string(geometry_.num_slots));
}

void SlotTable::set_state(SlotRecord& slot, SlotState state) {
  for (const auto& [which, change] : {std::pair{slot.state, -1}, std::pair{state, 1}}) {
    if (which == SlotState::kWriting) header_->num_writing += change;
    if (which == SlotState::kReady) header_->num_ready += change;
  }
  slot.state = state;
}

// The last to be freed are the first to be taken: memory once written is used again before new memory is claimed.
void SlotTable::make_free(int64_t slot) {
  set_state(slots_[slot], SlotState::kFree);
  slots_[slot].next_free = header_->first_free;
  header_->first_free = static_cast<uint32_t>(slot);
  ++header_->num_listed;
}

// The owner of the lock died in the middle of something: everything again from what each rank holds.
void SlotTable::rebuild() {
  header_->first_free = kNone;
  header_->num_listed = header_->num_writing = header_->num_ready = 0;
  for (int64_t i = header_->used - 1; i >= 0; --i) {
    SlotRecord& slot = slots_[i];
    slot.references = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) slot.references += refs(i, rank);
    const SlotState state = slot.state == SlotState::kReady ? SlotState::kReady : SlotState::kWriting;
    slot.state = SlotState::kFree;
    if (slot.references == 0)
      make_free(i);
    else
      set_state(slot, state);
  }
}

std::vector<int64_t> SlotTable::take(int64_t count) {
  if (count < 0) throw StoreFault(std::to_string(count) + " slots to take");
  const Lock lock(*this);
  std::vector<int64_t> taken;
  if (count > header_->num_listed + geometry_.num_slots - header_->used) return taken;
  taken.reserve(static_cast<size_t>(count));
  while (static_cast<int64_t>(taken.size()) < count) {
    int64_t index = header_->first_free;
    if (index != kNone) {
      header_->first_free = slots_[index].next_free;
      --header_->num_listed;
    } else {
      index = header_->used++;
    }
    keep_order();
    SlotRecord& slot = slots_[index];
    ++slot.generation;
    slot.references = 1;
    set_state(slot, SlotState::kWriting);
    keep_order();
    refs(index, rank_) = 1;
    keep_order();
    taken.push_back(index);
  }
  return taken;
}

template <typename Do, typename Undo>
void SlotTable::all_or_none(const int64_t* slots, int64_t count, const Do& apply, const Undo& undo) {
  int64_t done = 0;
  try {
    for (; done < count; ++done) {
      check_range(slots[done]);
      apply(slots[done]);
    }
  } catch (const StoreFault&) {
    while (done-- > 0) undo(slots[done]);
    throw;
  }
}

void SlotTable::complete(const int64_t* slots, int64_t count) {
  const Lock lock(*this);
  all_or_none(
      slots, count,
      [&](int64_t i) {
        if (slots_[i].state != SlotState::kWriting || refs(i, rank_) == 0)
          throw StoreFault(named(i) + " cannot be completed: it has to be WRITING, and this rank's");
        if (copies_[i].load() != 0) throw StoreFault(named(i) + " cannot be completed while a copy to it is under way");
        set_state(slots_[i], SlotState::kReady);
      },
      [&](int64_t i) { set_state(slots_[i], SlotState::kWriting); });
}

void SlotTable::share(const int64_t* slots, int64_t count) {
  const Lock lock(*this);
  all_or_none(
      slots, count,
      [&](int64_t i) {
        if (slots_[i].state != SlotState::kReady) throw StoreFault(named(i) + " cannot be shared: it has to be READY");
        ++refs(i, rank_);
        ++slots_[i].references;
      },
      [&](int64_t i) {
        --slots_[i].references;
        --refs(i, rank_);
      });
}

void SlotTable::free(const int64_t* slots, int64_t count) {
  const Lock lock(*this);
  all_or_none(
      slots, count,
      [&](int64_t i) {
        if (refs(i, rank_) == 0) throw StoreFault(named(i) + " cannot be freed: this rank holds no reference to it");
        if (refs(i, rank_) == 1 && copies_[i].load() != 0)
          throw StoreFault(named(i) + " cannot be freed while a copy of it is under way: wait for its ticket");
        --slots_[i].references;
        --refs(i, rank_);
      },
      [&](int64_t i) {
        ++refs(i, rank_);
        ++slots_[i].references;
      });
  for (int64_t k = 0; k < count; ++k)
    if (slots_[slots[k]].references == 0 && slots_[slots[k]].state != SlotState::kFree) make_free(slots[k]);
}

int64_t SlotTable::reclaim(int rank) {
  if (rank < 0 || rank >= num_ranks_)
    throw StoreFault("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks_));
  const Lock lock(*this);
  for (int64_t i = 0; rank == rank_ && i < header_->used; ++i)
    if (copies_[i].load() != 0)
      throw StoreFault(named(i) + " cannot be given up while a copy of it is under way: close the copy engine first");
  int64_t freed = 0;
  for (int64_t i = header_->used - 1; i >= 0; --i) {
    if (refs(i, rank) == 0) continue;
    slots_[i].references -= refs(i, rank);
    refs(i, rank) = 0;
    keep_order();
    if (slots_[i].references != 0) continue;
    make_free(i);
    ++freed;
  }
  header_->occupants[rank] = {0, 0};
  return freed;
}

void SlotTable::begin_copies(const int64_t* slots, int64_t count, bool to_slots) {
  const Lock lock(*this);
  all_or_none(
      slots, count,
      [&](int64_t i) {
        const bool alone = to_slots && slots_[i].state == SlotState::kReady && slots_[i].references == 1;
        if (refs(i, rank_) == 0 || (!alone && slots_[i].state != (to_slots ? SlotState::kWriting : SlotState::kReady)))
          throw StoreFault(named(i) + " cannot be " +
                          (to_slots ? "stored to: it has to be WRITING, or READY with one reference, and this rank's"
                                    : "loaded from: it has to be READY, and this rank's"));
        copies_[i].fetch_add(1);
      },
      [&](int64_t i) { copies_[i].fetch_sub(1); });
}

void SlotTable::end_copies(const int64_t* slots, int64_t count) {
  for (int64_t i = 0; i < count; ++i) copies_[slots[i]].fetch_sub(1);
}

SlotCounts SlotTable::counts() {
  const Lock lock(*this);
  return {header_->num_listed + geometry_.num_slots - header_->used, header_->num_writing, header_->num_ready,
          header_->recoveries};
}

void SlotTable::describe(const int64_t* slots, int64_t count, int64_t* states, int64_t* references) {
  const Lock lock(*this);
  for (int64_t k = 0; k < count; ++k) {
    check_range(slots[k]);
    states[k] = static_cast<int64_t>(slots_[slots[k]].state);
    references[k] = slots_[slots[k]].references;
  }
}

void SlotTable::audit() {
  const Lock lock(*this);
  int64_t free = 0, writing = 0, ready = 0, listed = 0;
  const auto fault = [](const std::string& what) { throw std::logic_error("the table of slots: " + what); };
  for (int64_t i = 0; i < header_->used; ++i) {
    uint32_t held = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) held += refs(i, rank);
    const SlotState state = slots_[i].state;
    if (held != slots_[i].references || (held == 0) != (state == SlotState::kFree))
      fault(named(i) + ", but the ranks hold " + std::to_string(held));
    ++(state == SlotState::kFree ? free : state == SlotState::kWriting ? writing : ready);
  }
  for (uint32_t i = header_->first_free; i != kNone && listed <= free; i = slots_[i].next_free) {
    if (slots_[i].state != SlotState::kFree) fault(named(i) + " is on the free list");
    ++listed;
  }
  if (listed != free || listed != header_->num_listed || writing != header_->num_writing || ready != header_->num_ready)
    fault(std::to_string(free) + " free, " + std::to_string(listed) + " listed, " + std::to_string(writing) + " WRITING and " +
          std::to_string(ready) + " READY, where its counts say " + std::to_string(header_->num_listed) + ", " +
          std::to_string(header_->num_writing) + " and " + std::to_string(header_->num_ready));
}

}  // namespace sgl_batch
