// Owns the threads that copy pages between the device and a store, and their counters. The order is copy_queue.h's, the
// copies are page_mover.h's, and which pages are copied is the caller's affair.
//
// No thread of it ever touches Python: who calls may hold the interpreter's lock or not.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy_queue.h"
#include "page_mover.h"

namespace sgl_batch {

struct CopyLimits {
  int num_workers;
  int64_t most_operations, most_bytes;  // that have not ended; whoever submits more waits
};

struct CopyTotals {
  int64_t stored_bytes, loaded_bytes, stored_pages, loaded_pages, operations, errors, cancelled;
  int64_t busy_ns;       // of all workers together
  int64_t submit_ns;     // waited by submitters for room
  int64_t wait_ns;       // waited by those who wait for an end
};

class CopyEngine {
 public:
  CopyEngine(std::shared_ptr<SlotTable> table, std::shared_ptr<Medium> medium, DevicePages device, CopyLimits limits);
  ~CopyEngine();

  // Copies layers [first, last) of pages[i] to or from slots[i]. Waits for room. Throws StoreFault, also when it is closed.
  Operation submit(bool to_slots, int64_t first_layer, int64_t last_layer, std::vector<int64_t> pages,
                   std::vector<int64_t> slots);

  bool wait(const Operation& operation, double timeout_s);  // whether it has ended; infinite where negative
  bool cancel(const Operation& operation);

  // Leaves out all that has not begun, waits for what is under way, and ends the threads. A second time nothing happens.
  void close();

  CopyTotals totals();

 private:
  void work();
  void copy(const CopyPart& part, MoverScratch& scratch);
  void finish(std::vector<Operation>& ended);
  void check(int64_t first_layer, int64_t last_layer, const std::vector<int64_t>& pages, const std::vector<int64_t>& slots) const;

  std::shared_ptr<SlotTable> table_;
  PageMover mover_;
  CopyLimits limits_;

  std::mutex mutex_;
  std::condition_variable work_or_stop_, ended_;
  CopyQueue queue_;
  CopyTotals totals_{};
  bool closed_ = false;
  std::mutex joining_;
  std::vector<std::thread> workers_;
};

}  // namespace sgl_batch
