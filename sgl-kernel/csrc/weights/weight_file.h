// Owns reading parts of a checkpoint's files, past the page cache where their file system allows it. What lies where in
// them is the caller's.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

namespace sgl_batch {

// A read that failed. `number` is an errno, or 0 where the file is too short.
struct ReadFault : std::runtime_error {
  ReadFault(int number, const std::string& what) : std::runtime_error(what), number(number) {}
  int number;
};

// Memory that a read of up to `bytes` bytes fits in, wherever in the file they lie.
class ReadBuffer {
 public:
  static constexpr int64_t kAround = 3 * 4096;  // what a read needs beside its bytes: blocks that it touches in part

  char* at_least(int64_t bytes);

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t room_ = 0;
};

class WeightFile {
 public:
  // `direct`: try to read past the page cache. `keeps_cached`: what is read through it stays there. Throws ReadFault.
  WeightFile(std::string name, bool direct, bool keeps_cached);
  WeightFile(const WeightFile&) = delete;
  WeightFile& operator=(const WeightFile&) = delete;
  ~WeightFile();

  // Reads bytes [offset, offset + bytes) and returns where they begin in the buffer, aligned for words of four bytes. Throws
  // ReadFault.
  const char* read(int64_t offset, int64_t bytes, ReadBuffer& buffer);

  const std::string& name() const { return name_; }
  bool direct() const { return direct_.load(std::memory_order_relaxed); }

 private:
  // Fills `to` from a position on until `needed` bytes are there, of the `most` that it may take.
  void fill(int64_t position, char* to, int64_t needed, int64_t most);
  void leave_direct();

  std::string name_;
  int fd_;
  std::atomic<bool> direct_;
  const bool keeps_cached_;
};

}  // namespace sgl_batch
