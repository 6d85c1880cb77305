// Owns scratch memory that outlives a call: it grows, stays, and lies on huge pages where the kernel grants them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace sgl_batch {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { release(); }

  // At least `bytes` bytes, aligned to a page; their content is undefined. Valid until the next call.
  void* at_least(size_t bytes) {
    if (bytes <= size_) return memory_;
    release();
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(memory, rounded, MADV_HUGEPAGE);  // advice: where it is not taken, small pages serve
#endif
    memory_ = memory;
    size_ = rounded;
    return memory_;
  }

 private:
  static constexpr size_t kHugePage = size_t{1} << 21;

  void release() {
    if (memory_ != nullptr) munmap(memory_, size_);
    memory_ = nullptr;
    size_ = 0;
  }

  void* memory_ = nullptr;
  size_t size_ = 0;
};

// Each part begins at a cache line of its own.
class Carver {
 public:
  size_t take(size_t bytes) {
    const size_t at = next_;
    next_ += (bytes + 63) / 64 * 64;
    return at;
  }
  size_t total() const { return next_; }

 private:
  size_t next_ = 0;
};

}  // namespace sgl_batch
