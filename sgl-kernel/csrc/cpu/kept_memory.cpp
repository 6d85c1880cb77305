// Owns the memory of torch's large tensors on the CPU, once it is asked to: what one tensor frees, the next one gets.
//
// The C library gives memory of over 32 MiB back at once, and takes it anew for the next tensor; the kernel then clears it
// page by page, which takes an eighth of a decode step over 1,024 sequences. Its heap would keep it, but cannot fill the
// gap that an aligned block leaves with a block of the same size, so that it would grow.
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <list>
#include <mutex>
#include <unordered_map>

#include "huge_memory.h"
#include "reserved_memory.h"

namespace sgl_batch {
namespace {

struct Memory {
  void* data;
  size_t bytes;
};

class KeptMemory final : public c10::Allocator {
 public:
  // Never destroyed: tensors may outlive everything else.
  static KeptMemory& instance() {
    static auto* const one = new KeptMemory;
    return *one;
  }

  void keep(size_t most) {
    const std::lock_guard lock(mutex_);
    most_ = most;
    trim();
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes < kHugePage ? others_.raw_allocate(bytes) : take(whole_huge_pages(bytes));
    return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void free(void* data) { instance().give_back(data); }

  // The smallest memory that is kept and fits, without a quarter to spare.
  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = kept_.end();
    for (auto one = kept_.begin(); one != kept_.end(); ++one) {
      const bool fits = one->bytes >= bytes && one->bytes <= bytes + bytes / 4;
      if (fits && (best == kept_.end() || one->bytes < best->bytes)) best = one;
    }
    Memory found{};
    if (best == kept_.end()) {
      found = {take_huge_pages(bytes), bytes};
      TORCH_CHECK(found.data != nullptr, "there is no memory for a tensor of ", bytes, " bytes");
    } else {
      found = *best;
      kept_bytes_ -= found.bytes;
      kept_.erase(best);
    }
    in_use_.emplace(found.data, found.bytes);
    return found.data;
  }

  void give_back(void* data) {
    if (reinterpret_cast<uintptr_t>(data) % kHugePage == 0) {
      const std::lock_guard lock(mutex_);
      if (const auto one = in_use_.find(data); one != in_use_.end()) {
        kept_.push_back({data, one->second});
        kept_bytes_ += one->second;
        in_use_.erase(one);
        trim();
        return;
      }
    }
    others_.raw_deallocate(data);
  }

  // What was kept longest goes first.
  void trim() {
    while (kept_bytes_ > most_) {
      munmap(kept_.front().data, kept_.front().bytes);
      kept_bytes_ -= kept_.front().bytes;
      kept_.pop_front();
    }
  }

  c10::Allocator& others_ = *c10::GetDefaultCPUAllocator();
  std::mutex mutex_;
  std::unordered_map<void*, size_t> in_use_;
  std::list<Memory> kept_;
  size_t kept_bytes_ = 0, most_ = 0;
};

void keep_memory(int64_t most_bytes) {
  TORCH_CHECK(most_bytes >= 0, "at most ", most_bytes, " bytes are to be kept: give 0 or more");
  KeptMemory& kept = KeptMemory::instance();
  kept.keep(static_cast<size_t>(most_bytes));
  c10::SetCPUAllocator(&kept, /*priority=*/1);
}

int64_t reserve(int64_t most_bytes, double seconds, int64_t threads) {
  TORCH_CHECK(most_bytes >= 0 && threads >= 1, most_bytes, " bytes are to be reserved by ", threads,
              " threads: give 0 bytes or more, and 1 thread or more");
  return static_cast<int64_t>(reserve_memory(static_cast<size_t>(most_bytes), seconds, static_cast<int>(threads)));
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("keep_memory(int most_bytes) -> ()", sgl_batch::keep_memory);
  library.def("reserve_memory(int most_bytes, float seconds, int threads) -> int", sgl_batch::reserve);
}
