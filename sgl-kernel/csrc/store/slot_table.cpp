// Owns the shared table of slots: see slot_table.h.
#include "slot_table.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace sgl_batch {
namespace {

constexpr uint64_t kMagic = 0x31656c6261547653;
constexpr uint32_t kNone = UINT32_MAX;
constexpr int kGeometryNumbers = Geometry::kNumbers + 2 * kMostParts;

const char* name_of(SlotState state) {
  return state == SlotState::kFree ? "FREE" : state == SlotState::kWriting ? "WRITING" : "READY";
}

// What follows must not be seen by another process before what precedes: the owner can die in between. The hardware
// keeps the order of one thread's stores for whoever takes the lock after it.
void keep_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

void throw_errno(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

}  // namespace

struct SlotTable::Header {
  uint64_t magic;
  int64_t geometry[kGeometryNumbers];
  int64_t num_ranks;
  pthread_mutex_t mutex;
  int64_t used;  // slots [used, num_slots) were never taken and are free
  int64_t num_listed, num_writing, num_ready;
  int64_t recoveries;
  uint32_t first_free;
  struct {
    int64_t pid, start;
  } occupants[kMostStoreRanks];
};

class SlotTable::Lock {
 public:
  explicit Lock(SlotTable& table) : mutex_(&table.header_->mutex) {
    const int error = pthread_mutex_lock(mutex_);
    if (error != 0 && error != EOWNERDEAD) throw_errno(error, "locking the table of slots");
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
    : geometry_(Geometry::of(geometry)), num_ranks_(num_ranks), rank_(rank), copies_(nullptr, &std::free) {
  if (num_ranks < 1 || num_ranks > kMostStoreRanks || rank < 0 || rank >= num_ranks)
    throw StoreFault("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + "; at most " +
                    std::to_string(kMostStoreRanks) + " ranks share a store");
  const auto slots = static_cast<size_t>(geometry_.num_slots);
  static_assert(sizeof(Header) <= 4096 && sizeof(Slot) == 16);
  bytes_ = 4096 + slots * (sizeof(Slot) + 4 * static_cast<size_t>(num_ranks));
  if (create && ftruncate(fd, static_cast<off_t>(bytes_)) != 0) throw_errno(errno, "sizing the table of slots");
  struct stat found {};
  if (fstat(fd, &found) != 0) throw_errno(errno, "looking at the table of slots");
  // Beyond the end of a file its mapping cannot be read.
  if (found.st_size < 4096) throw StoreFault("this is no table of slots");
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw_errno(errno, "mapping the table of slots");
  header_ = static_cast<Header*>(memory);
  slots_ = reinterpret_cast<Slot*>(static_cast<char*>(memory) + 4096);
  refs_ = reinterpret_cast<uint32_t*>(slots_ + slots);
  int64_t numbers[kGeometryNumbers] = {};
  std::copy(geometry.begin(), geometry.end(), numbers);
  if (create) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&header_->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    std::copy_n(numbers, kGeometryNumbers, header_->geometry);
    header_->num_ranks = num_ranks;
    header_->first_free = kNone;
    header_->magic = kMagic;
  } else if (header_->magic != kMagic || header_->num_ranks != num_ranks ||
             !std::equal(numbers, numbers + kGeometryNumbers, header_->geometry)) {
    munmap(memory, bytes_);
    throw StoreFault("the store was made for other pages, another size or another number of ranks");
  }
  // Zero, and claimed only where it is written.
  copies_.reset(static_cast<std::atomic<uint32_t>*>(std::calloc(slots, sizeof(std::atomic<uint32_t>))));
  if (copies_ == nullptr) {
    munmap(memory, bytes_);
    throw std::bad_alloc();
  }
}

SlotTable::~SlotTable() { munmap(header_, bytes_); }

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
  const Slot& s = slots_[slot];
  return "slot " + std::to_string(slot) + " (" + name_of(s.state) + ", " + std::to_string(s.references) +
         " references, " + std::to_string(refs(slot, rank_)) + " of them this rank's)";
}

void SlotTable::check_range(int64_t slot) const {
  if (slot < 0 || slot >= geometry_.num_slots)
    throw StoreFault("slot " + std::to_string(slot) + " of " + std::to_string(geometry_.num_slots));
}

void SlotTable::set_state(Slot& slot, SlotState state) {
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
    Slot& slot = slots_[i];
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
    Slot& slot = slots_[index];
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
  const SlotState needed = to_slots ? SlotState::kWriting : SlotState::kReady;
  all_or_none(
      slots, count,
      [&](int64_t i) {
        if (slots_[i].state != needed || refs(i, rank_) == 0)
          throw StoreFault(named(i) + " cannot be " + (to_slots ? "stored to" : "loaded from") + ": it has to be " +
                          name_of(needed) + ", and this rank's");
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
