// Owns the order of copies: which operation may run, which part of it is next, and what waits for room. It copies
// nothing and has no threads; its owner holds a lock around every call.
//
// Operations that touch the same slot or the same device page run in the order in which they came; others may overlap.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace sgl_batch {

enum class CopyEnd : int { kNone, kDone, kFailed, kCancelled };

// Many pages of a span of layers, one way. Units are (page, layer) pairs, layer by layer within a page.
struct CopyOperation {
  bool to_slots;
  int64_t first_layer, num_layers;
  std::vector<int64_t> pages, slots;
  int64_t bytes;

  // The rest is the queue's.
  uint64_t number = 0;
  int64_t next_unit = 0, running = 0, blockers = 0;
  std::vector<std::shared_ptr<CopyOperation>> followers;
  CopyEnd fate = CopyEnd::kDone;  // how it is going to end
  int error_number = 0;
  std::string error;
  std::atomic<CopyEnd> end{CopyEnd::kNone};  // and how it has ended

  int64_t num_units() const { return static_cast<int64_t>(pages.size()) * num_layers; }
};

using Operation = std::shared_ptr<CopyOperation>;

// Units [first, last) of an operation.
struct CopyPart {
  Operation operation;
  int64_t first, last;
};

class CopyQueue {
 public:
  CopyQueue(int64_t num_pages, int64_t num_slots, int64_t most_operations, int64_t most_bytes, int64_t unit_bytes);

  // Whether one of so many bytes may enter; one that is larger than the queue enters an empty one.
  bool has_room(int64_t bytes) const {
    return live_.empty() || (static_cast<int64_t>(live_.size()) < most_operations_ && bytes_ + bytes <= most_bytes_);
  }

  // Throws StoreFault for an operation with two sources for one target; nothing has changed then.
  void enter(const Operation& operation);

  bool has_part() const { return !ready_.empty(); }
  bool empty() const { return live_.empty(); }
  CopyPart next_part();

  // A part has been copied, or not: `error` empty, or what went wrong, which leaves out what has not begun. Operations
  // that come to their end by it are added to `ended`: the caller sets their `end` for those who look at it.
  void part_done(const CopyPart& part, int error_number, const std::string& error, std::vector<Operation>& ended);

  // Leaves out what has not begun; whether there was any. It ends when what is under way, and what it had to wait for,
  // has ended: others rely on its place.
  bool cancel(const Operation& operation, std::vector<Operation>& ended);

  std::vector<Operation> live() const;

 private:
  using Numbers = std::unique_ptr<uint64_t[], decltype(&std::free)>;

  void drop_rest(const Operation& operation);
  void end_if_over(Operation operation, std::vector<Operation>& ended);
  void follow(const Operation& operation, uint64_t& last);
  void check_targets(const CopyOperation& operation);

  int64_t most_operations_, most_bytes_, unit_bytes_;
  int64_t bytes_ = 0;
  uint64_t last_number_ = 0, last_check_ = 0;
  std::unordered_map<uint64_t, Operation> live_;
  std::deque<Operation> ready_;
  Numbers page_last_, slot_last_;    // the last operation to touch each
  Numbers page_check_, slot_check_;  // the last check that met each
};

}  // namespace sgl_batch
