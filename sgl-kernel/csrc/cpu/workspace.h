// Owns scratch memory that outlives a call: it grows, stays, and lies on huge pages where the kernel grants them. What a
// large call took is given back once many calls in a row have needed less. In a build with AddressSanitizer nothing can be
// read or written between and behind its parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

#include "huge_memory.h"
#include "reserved_memory.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>

#include <utility>
#include <vector>
#endif

namespace sgl_batch {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { release(); }

  // At least `bytes` bytes, aligned to a page; their content is undefined. Valid until the next call.
  void* at_least(size_t bytes) {
    if (bytes > size_) grow(bytes);
    largest_ = std::max(largest_, bytes);
    touched_ = std::max(touched_, bytes);
    if (++calls_ == kCalls) {
      if (largest_ + kSpare < touched_) give_back(largest_);
      calls_ = 0, largest_ = bytes;
    }
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(memory_, bytes);
    ASAN_POISON_MEMORY_REGION(static_cast<char*>(memory_) + bytes, size_ - bytes);
#endif
    return memory_;
  }

 private:
  static constexpr size_t kSpare = size_t{32} << 20;  // less is kept: to touch it anew takes longer than a small call
  // Decided upon together. More than a forward pass has: its last layer can need little where the others need much.
  static constexpr int kCalls = 512;

  void give_back(size_t bytes) {
    const size_t kept = whole_huge_pages(bytes);
    madvise(static_cast<char*>(memory_) + kept, size_ - kept, MADV_DONTNEED);
    touched_ = kept;
  }

  void grow(size_t bytes) {
    release();
    memory_ = take_huge_pages(whole_huge_pages(bytes));
    if (memory_ == nullptr) throw std::bad_alloc();
    size_ = whole_huge_pages(bytes);
  }

  void release() {
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(memory_, size_);
#endif
    if (memory_ != nullptr) munmap(memory_, size_);
    memory_ = nullptr;
    size_ = touched_ = 0;
  }

  void* memory_ = nullptr;
  size_t size_ = 0, touched_ = 0;
  size_t largest_ = 0;  // of the last calls_ calls
  int calls_ = 0;
};

// Each part begins at a cache line of its own.
class Carver {
 public:
  size_t take(size_t bytes) {
    const size_t at = next_;
    next_ += (bytes + 63) / 64 * 64;
#ifdef __SANITIZE_ADDRESS__
    next_ += kGap;
    gaps_.emplace_back(at + bytes, next_);
#endif
    return at;
  }
  size_t total() const { return next_; }

  // To be called for the memory of every thread that has these parts.
  void guard([[maybe_unused]] char* base) const {
#ifdef __SANITIZE_ADDRESS__
    for (const auto& [from, to] : gaps_) ASAN_POISON_MEMORY_REGION(base + from, to - from);
#endif
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kGap = 4096;
  std::vector<std::pair<size_t, size_t>> gaps_;
#endif
  size_t next_ = 0;
};

}  // namespace sgl_batch
