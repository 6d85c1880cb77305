#include "reserved_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "huge_memory.h"

namespace sgl_batch {
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // of Linux 5.14; headers may be older
#endif

struct Reserve {
  std::mutex mutex;
  char* begin = nullptr;
  size_t bytes = 0;

  void replace(char* memory, size_t count) {
    const std::lock_guard lock(mutex);
    if (bytes > 0) munmap(begin, bytes);
    begin = memory, bytes = count;
  }
};

// Never destroyed: tensors may outlive everything else.
Reserve& reserve() {
  static auto* const one = new Reserve;
  return *one;
}

// Bytes from `memory` on that the kernel has given, by the time that is left or by when it refuses.
size_t populate(char* memory, size_t bytes, double seconds, int threads) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<size_t> next = 0, refused = bytes;
  const auto take = [&] {
    while (std::chrono::steady_clock::now() < end && refused == bytes) {
      const size_t at = next.fetch_add(kHugePage);
      if (at >= bytes) return;
      if (madvise(memory + at, kHugePage, kPopulateWrite) == 0) continue;
      for (size_t first = refused; at < first && !refused.compare_exchange_weak(first, at);) continue;
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(take);
  take();
  for (std::thread& other : others) other.join();
  return std::min({next.load(), refused.load(), bytes});
}

}  // namespace

size_t reserve_memory(size_t bytes, double seconds, int threads) {
  const size_t all = whole_huge_pages(bytes);
  char* memory = all == 0 ? nullptr : static_cast<char*>(map_huge_pages(all));
  const size_t given = memory == nullptr ? 0 : populate(memory, all, seconds, threads);
  if (memory != nullptr && given < all) munmap(memory + given, all - given);
  reserve().replace(memory, given);
  return given;
}

void* take_huge_pages(size_t bytes) {
  Reserve& from = reserve();
  {
    const std::lock_guard lock(from.mutex);
    if (bytes <= from.bytes) {
      from.bytes -= bytes;
      return std::exchange(from.begin, from.begin + bytes);
    }
  }
  return map_huge_pages(bytes);
}

}  // namespace sgl_batch
