// Owns the mapping of a table of slots: see slot_memory.h.
#include "slot_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace sgl_batch {
namespace {

constexpr uint64_t kMagic = 0x31656c6261547653;
constexpr size_t kHeaderBytes = 4096;
static_assert(sizeof(SlotHeader) <= kHeaderBytes && sizeof(SlotRecord) == 16);

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

SlotMemory::SlotMemory(int fd, bool create, const std::vector<int64_t>& geometry, int num_slots, int num_ranks)
    : num_slots_(static_cast<size_t>(num_slots)),
      bytes_(kHeaderBytes + num_slots_ * (sizeof(SlotRecord) + sizeof(uint32_t) * static_cast<size_t>(num_ranks))) {
  if (create && ftruncate(fd, static_cast<off_t>(bytes_)) != 0) throw_errno("sizing the table of slots");
  struct stat found {};
  if (fstat(fd, &found) != 0) throw_errno("looking at the table of slots");
  // Beyond the end of a file its mapping cannot be read.
  if (found.st_size < static_cast<off_t>(kHeaderBytes)) throw StoreFault("this is no table of slots");
  memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory_ == MAP_FAILED) throw_errno("mapping the table of slots");
  int64_t numbers[SlotHeader::kGeometryNumbers] = {};
  std::copy(geometry.begin(), geometry.end(), numbers);
  if (create) {
    begin(numbers, num_ranks);
  } else if (header().magic != kMagic || header().num_ranks != num_ranks ||
             !std::equal(std::begin(numbers), std::end(numbers), header().geometry)) {
    munmap(memory_, bytes_);
    throw StoreFault("the store was made for other pages, another size or another number of ranks");
  }
}

SlotMemory::~SlotMemory() { munmap(memory_, bytes_); }

SlotRecord* SlotMemory::slots() const {
  return reinterpret_cast<SlotRecord*>(static_cast<char*>(memory_) + kHeaderBytes);
}

// The file is all zeros, which is what everything else begins with.
void SlotMemory::begin(const int64_t* geometry, int num_ranks) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&header().mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  std::copy_n(geometry, SlotHeader::kGeometryNumbers, header().geometry);
  header().num_ranks = num_ranks;
  header().first_free = kNone;
  header().magic = kMagic;
}

}  // namespace sgl_batch
