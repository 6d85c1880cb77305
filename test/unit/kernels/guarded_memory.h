// Owns memory for checks of what a kernel reads and writes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {

// Memory that ends where nothing may be read.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes), whole_((bytes + kPage - 1) / kPage * kPage + kPage) {
    base_ = static_cast<char*>(mmap(nullptr, whole_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + whole_ - kPage, kPage, PROT_NONE) != 0) std::abort();
    memset(base_, 0xff, whole_ - kPage);  // NaN in every number type
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, whole_); }
  char* data() const { return base_ + whole_ - kPage - bytes_; }

 private:
  static constexpr size_t kPage = 4096;
  size_t bytes_, whole_;
  char* base_;
};

}  // namespace
