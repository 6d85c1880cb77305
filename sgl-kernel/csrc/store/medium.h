// Owns reading and writing the bytes of a store: memory, or a file. What lies where is the caller's.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace sgl_batch {

// A copy that could not be made. `number` is an errno, or 0 where the system reported none.
struct CopyFault : std::runtime_error {
  CopyFault(int number, const std::string& what) : std::runtime_error(what), number(number) {}
  int number;
};

constexpr int kMostPieces = 1024;  // of one call, as the system allows at least

class Medium {
 public:
  virtual ~Medium() = default;

  // Puts the pieces one after the other at `offset`, or fills them from there; at most kMostPieces. A piece without an
  // address is padding: its bytes are whatever they are. Throws CopyFault.
  virtual void write(int64_t offset, const iovec* pieces, int count) = 0;
  virtual void read(int64_t offset, const iovec* pieces, int count) = 0;

  virtual char* memory() { return nullptr; }  // where all of it can be addressed, else null
};

// `fd` is shared memory, or -1 for memory of this process alone. Claimed when it is first written, in huge pages where
// the system grants them. Throws std::system_error.
std::unique_ptr<Medium> memory_medium(int fd, int64_t bytes);

// `fd` is a file, of which a copy is kept; `name` stands in messages.
std::unique_ptr<Medium> file_medium(int fd, std::string name);

}  // namespace sgl_batch
