// Owns taking memory from the kernel in huge pages.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace sgl_batch {

constexpr size_t kHugePage = size_t{1} << 21;

inline size_t whole_huge_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// Whole huge pages on addresses of huge pages, to be given back with munmap; null if there is no memory.
inline void* map_huge_pages(size_t bytes) {
  const size_t all = bytes + kHugePage;
  void* memory = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(memory);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(memory) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, all - before - bytes);
#ifdef MADV_HUGEPAGE
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // advice: where it is not taken, small pages serve
#endif
  return begin + before;
}

}  // namespace sgl_batch
