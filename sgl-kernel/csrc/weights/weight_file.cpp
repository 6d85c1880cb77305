// Owns reading a checkpoint's files: see weight_file.h.
#include "weight_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace sgl_batch {
namespace {

constexpr int64_t kBlock = 4096;   // direct reads begin and end at multiples of it, in the file and in memory
constexpr int64_t kAlignment = 4;  // of what a caller gets: the words that weights are packed from

// A read into small pages reaches the disk in many short pieces: into huge ones it was three times as fast.
constexpr int64_t kHugePage = 2 << 20;

int64_t down(int64_t bytes) { return bytes / kBlock * kBlock; }
int64_t up(int64_t bytes) { return down(bytes + kBlock - 1); }

}  // namespace

char* ReadBuffer::at_least(int64_t bytes) {
  const int64_t needed = (bytes + kAround + kHugePage - 1) / kHugePage * kHugePage;
  if (needed > room_) {
    memory_.reset();
    memory_.reset(static_cast<char*>(std::aligned_alloc(kHugePage, static_cast<size_t>(needed))));
    room_ = memory_ == nullptr ? 0 : needed;
    if (memory_ == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(memory_.get(), static_cast<size_t>(needed), MADV_HUGEPAGE);  // advice: where it is not taken, small pages serve
#endif
  }
  return memory_.get();
}

WeightFile::WeightFile(std::string name, bool direct, bool keeps_cached)
    : name_(std::move(name)), fd_(-1), direct_(direct), keeps_cached_(keeps_cached) {
  if (direct) fd_ = open(name_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (fd_ < 0) {
    // A file system that cannot says EINVAL; whatever else is wrong shows again.
    direct_ = false;
    fd_ = open(name_.c_str(), O_RDONLY | O_CLOEXEC);
  }
  if (fd_ < 0) throw ReadFault(errno, "opening " + name_ + ": " + std::strerror(errno));
}

WeightFile::~WeightFile() { close(fd_); }

const char* WeightFile::read(int64_t offset, int64_t bytes, ReadBuffer& buffer) {
  char* memory = buffer.at_least(bytes);
  if (direct()) {
    const int64_t begin = down(offset), skipped = offset - begin;
    try {
      fill(begin, memory, skipped + bytes, up(skipped + bytes));
      if (skipped % kAlignment == 0) return memory + skipped;
      std::memmove(memory, memory + skipped, static_cast<size_t>(bytes));
      return memory;
    } catch (const ReadFault& fault) {
      if (fault.number != EINVAL) throw;
      leave_direct();
    }
  }
  fill(offset, memory, bytes, bytes);
  if (!keeps_cached_) posix_fadvise(fd_, offset, bytes, POSIX_FADV_DONTNEED);
  return memory;
}

void WeightFile::fill(int64_t position, char* to, int64_t needed, int64_t most) {
  int64_t done = 0;
  while (done < needed) {
    const ssize_t got = pread(fd_, to + done, static_cast<size_t>(most - done), position + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw ReadFault(errno, "reading " + std::to_string(needed) + " bytes at byte " + std::to_string(position) + " of " +
                                 name_ + ": " + std::strerror(errno));
    if (got == 0) {
      struct stat found {};
      fstat(fd_, &found);
      throw ReadFault(0, name_ + " has only " + std::to_string(found.st_size) + " bytes: " + std::to_string(needed - done) +
                             " from byte " + std::to_string(position + done) +
                             " on are missing; something has cut it short");
    }
    // What a direct read leaves of a block is read again with it.
    const int64_t reached = done + got;
    done = reached >= needed || !direct() || down(reached) == done ? reached : down(reached);
  }
}

void WeightFile::leave_direct() {
  const int flags = fcntl(fd_, F_GETFL);
  fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  direct_ = false;
}

}  // namespace sgl_batch
