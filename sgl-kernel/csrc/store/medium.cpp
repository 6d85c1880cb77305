// Owns the memory and the file of a store: see medium.h.
#include "medium.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

namespace sgl_batch {
namespace {

class Memory : public Medium {
 public:
  Memory(int fd, int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mapping the memory of the store");
    base_ = static_cast<char*>(memory);
    // A refusal changes nothing but speed.
    madvise(memory, bytes_, MADV_HUGEPAGE);
  }
  ~Memory() override { munmap(base_, bytes_); }

  void write(int64_t offset, const iovec* pieces, int count) override {
    each(offset, pieces, count, [](char* there, const iovec& piece) { std::memcpy(there, piece.iov_base, piece.iov_len); });
  }

  void read(int64_t offset, const iovec* pieces, int count) override {
    each(offset, pieces, count, [](char* there, const iovec& piece) { std::memcpy(piece.iov_base, there, piece.iov_len); });
  }

  char* memory() override { return base_; }

 private:
  template <typename Copy>
  void each(int64_t offset, const iovec* pieces, int count, const Copy& copy) {
    for (int i = 0; i < count; offset += static_cast<int64_t>(pieces[i++].iov_len)) {
      if (i + 1 < count) fetch(pieces[i + 1]);
      if (pieces[i].iov_base != nullptr) copy(base_ + offset, pieces[i]);
    }
  }

  // The next piece lies somewhere else, where the hardware does not look ahead: with pieces of 4 KiB its first lines would
  // cost half the time of a copy.
  static void fetch(const iovec& piece) {
    for (size_t at = 0; piece.iov_base != nullptr && at < std::min<size_t>(piece.iov_len, 1024); at += 64)
      __builtin_prefetch(static_cast<const char*>(piece.iov_base) + at);
  }

  size_t bytes_;
  char* base_;
};

class File : public Medium {
 public:
  File(int fd, std::string name) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)), name_(std::move(name)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "keeping the file of the store open");
  }
  ~File() override { close(fd_); }

  void write(int64_t offset, const iovec* pieces, int count) override {
    move(offset, pieces, count, true, [&](const iovec* rest, int left, int64_t at) { return pwritev(fd_, rest, left, at); });
  }

  void read(int64_t offset, const iovec* pieces, int count) override {
    move(offset, pieces, count, false, [&](const iovec* rest, int left, int64_t at) { return preadv(fd_, rest, left, at); });
  }

 private:
  // Goes on where a call moved less than all, as it may whenever it likes.
  template <typename Call>
  void move(int64_t offset, const iovec* pieces, int count, bool writing, const Call& call) {
    std::array<iovec, kMostPieces> rest;
    alignas(64) char padding[kMostPadding] = {};
    size_t left = 0;
    for (int i = 0; i < count; ++i) {
      rest[i] = pieces[i].iov_base != nullptr ? pieces[i] : iovec{padding, pieces[i].iov_len};
      if (pieces[i].iov_base == nullptr && pieces[i].iov_len > sizeof padding) throw CopyFault(0, "too much padding");
      left += rest[i].iov_len;
    }
    iovec* next = rest.data();
    while (left > 0) {
      const ssize_t moved = call(next, static_cast<int>(rest.data() + count - next), offset);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) fail(errno, writing, offset, left);
      if (moved == 0) throw CopyFault(0, ends_early(writing, offset, left));
      offset += moved;
      left -= static_cast<size_t>(moved);
      for (auto skip = static_cast<size_t>(moved); skip > 0;) {
        const size_t step = std::min(skip, next->iov_len);
        next->iov_base = static_cast<char*>(next->iov_base) + step;
        next->iov_len -= step;
        skip -= step;
        if (next->iov_len == 0) ++next;
      }
    }
  }

  std::string ends_early(bool writing, int64_t offset, size_t left) const {
    if (writing) return "the file " + name_ + " takes nothing more at byte " + std::to_string(offset);
    struct stat found {};
    fstat(fd_, &found);
    return "the file " + name_ + " has only " + std::to_string(found.st_size) + " bytes: " + std::to_string(left) +
           " from byte " + std::to_string(offset) + " on are missing; something has cut it short";
  }

  [[noreturn]] void fail(int number, bool writing, int64_t offset, size_t left) const {
    std::string what = std::string(writing ? "writing " : "reading ") + std::to_string(left) + " bytes at byte " +
                       std::to_string(offset) + " of the file " + name_ + ": " + std::strerror(number);
    if (number == ENOSPC || number == EDQUOT) {
      struct stat found {};
      struct statvfs space {};
      fstat(fd_, &found);
      fstatvfs(fd_, &space);
      what += "; the whole store needs " + std::to_string(std::max<int64_t>(0, found.st_size - found.st_blocks * 512)) +
              " bytes more, and its file system has " + std::to_string(space.f_bavail * space.f_frsize) +
              " free: make room there, name another directory (--kv-store-dir) or a smaller store (--kv-store-bytes)";
    } else if (number == EFBIG) {
      what += "; lift the limit on the size of files (ulimit -f), or name a smaller store (--kv-store-bytes)";
    }
    throw CopyFault(number, what);
  }

  static constexpr size_t kMostPadding = 4096;

  int fd_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Medium> memory_medium(int fd, int64_t bytes) { return std::make_unique<Memory>(fd, bytes); }

std::unique_ptr<Medium> file_medium(int fd, std::string name) { return std::make_unique<File>(fd, std::move(name)); }

}  // namespace sgl_batch
