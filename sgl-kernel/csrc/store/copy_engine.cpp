// Owns the copy threads: see copy_engine.h.
#include "copy_engine.h"

#include <chrono>

#include "../worker_threads.h"

namespace sgl_batch {
namespace {

int64_t unit_bytes(const Geometry& geometry) {
  int64_t bytes = 0;
  for (const int64_t part : geometry.part_bytes) bytes += part;
  return bytes;
}

}  // namespace

CopyEngine::CopyEngine(std::shared_ptr<SlotTable> table, std::shared_ptr<Medium> medium, DevicePages device,
                       CopyLimits limits)
    : table_(table),
      mover_(table, std::move(medium), std::move(device)),
      limits_(limits),
      queue_(mover_.num_pages(), table->geometry().num_slots, limits.most_operations, limits.most_bytes,
             unit_bytes(table->geometry())) {
  try {
    for (int index = 0; index < limits.num_workers; ++index) {
      workers_.emplace_back([this] { work(); });
      pthread_setname_np(workers_.back().native_handle(), ("sgl-copy-" + std::to_string(index)).c_str());
    }
  } catch (...) {
    close();
    throw;
  }
}

CopyEngine::~CopyEngine() { close(); }

void CopyEngine::check(int64_t first_layer, int64_t last_layer, const std::vector<int64_t>& pages,
                       const std::vector<int64_t>& slots) const {
  if (first_layer < 0 || last_layer < first_layer || last_layer > table_->geometry().num_layers)
    throw StoreFault("layers " + std::to_string(first_layer) + " to " + std::to_string(last_layer) + " of " +
                    std::to_string(table_->geometry().num_layers));
  if (pages.size() != slots.size())
    throw StoreFault(std::to_string(pages.size()) + " device pages and " + std::to_string(slots.size()) + " slots");
  for (const int64_t page : pages)
    if (page < 0 || page >= mover_.num_pages())
      throw StoreFault("device page " + std::to_string(page) + " of " + std::to_string(mover_.num_pages()));
}

Operation CopyEngine::submit(bool to_slots, int64_t first_layer, int64_t last_layer, std::vector<int64_t> pages,
                             std::vector<int64_t> slots) {
  check(first_layer, last_layer, pages, slots);
  auto operation = std::make_shared<CopyOperation>();
  operation->to_slots = to_slots;
  operation->first_layer = first_layer;
  operation->num_layers = last_layer - first_layer;
  operation->bytes = static_cast<int64_t>(pages.size()) * operation->num_layers * unit_bytes(table_->geometry());
  operation->pages = std::move(pages);
  operation->slots = std::move(slots);
  // From here on nobody can let go of the slots, also while this waits.
  table_->begin_copies(operation->slots.data(), static_cast<int64_t>(operation->slots.size()), to_slots);
  try {
    std::unique_lock lock(mutex_);
    if (!closed_ && !queue_.has_room(operation->bytes)) {
      const int64_t begun = now_ns();
      ended_.wait(lock, [&] { return closed_ || queue_.has_room(operation->bytes); });
      totals_.submit_ns += now_ns() - begun;
    }
    if (closed_) throw StoreFault("the copy engine is closed");
    queue_.enter(operation);
    ++totals_.operations;
  } catch (...) {
    table_->end_copies(operation->slots.data(), static_cast<int64_t>(operation->slots.size()));
    throw;
  }
  work_or_stop_.notify_all();
  return operation;
}

bool CopyEngine::wait(const Operation& operation, double timeout_s) {
  const auto over = [&] { return operation->end.load(std::memory_order_acquire) != CopyEnd::kNone; };
  if (over()) return true;
  std::unique_lock lock(mutex_);
  const int64_t begun = now_ns();
  bool ended = true;
  // So long that nobody lives to see it, and short enough to be added to a clock.
  constexpr double kForever = 1e8;
  if (timeout_s < 0 || timeout_s > kForever)
    ended_.wait(lock, over);
  else
    ended = ended_.wait_for(lock, std::chrono::duration<double>(timeout_s), over);
  totals_.wait_ns += now_ns() - begun;
  return ended;
}

bool CopyEngine::cancel(const Operation& operation) {
  std::vector<Operation> ended;
  const std::lock_guard lock(mutex_);
  if (operation->end.load() != CopyEnd::kNone) return false;
  const bool left_out = queue_.cancel(operation, ended);
  finish(ended);
  return left_out;
}

// With the lock held. The slots may be let go of before anybody sees the end.
void CopyEngine::finish(std::vector<Operation>& ended) {
  for (const Operation& operation : ended) {
    const auto pages = static_cast<int64_t>(operation->pages.size());
    table_->end_copies(operation->slots.data(), pages);
    if (operation->fate == CopyEnd::kDone) {
      (operation->to_slots ? totals_.stored_bytes : totals_.loaded_bytes) += operation->bytes;
      (operation->to_slots ? totals_.stored_pages : totals_.loaded_pages) += pages;
    }
    totals_.errors += operation->fate == CopyEnd::kFailed;
    totals_.cancelled += operation->fate == CopyEnd::kCancelled;
    operation->end.store(operation->fate, std::memory_order_release);
  }
  if (!ended.empty()) ended_.notify_all();
}

void CopyEngine::copy(const CopyPart& part, MoverScratch& scratch) {
  const CopyOperation& operation = *part.operation;
  for (int64_t unit = part.first; unit < part.last;) {
    const int64_t index = unit / operation.num_layers, layer = unit % operation.num_layers;
    const int64_t count = std::min(part.last - unit, operation.num_layers - layer);
    const int64_t page = operation.pages[index], slot = operation.slots[index];
    const int64_t first = operation.first_layer + layer, last = first + count;
    try {
      operation.to_slots ? mover_.store(page, slot, first, last, scratch) : mover_.load(slot, page, first, last, scratch);
    } catch (const CopyFault& fault) {
      const std::string where = "layers " + std::to_string(first) + " to " + std::to_string(last - 1) + " of device page " +
                                std::to_string(page) + (operation.to_slots ? " to slot " : " from slot ") +
                                std::to_string(slot) + ": ";
      throw CopyFault(fault.number, where + fault.what());
    }
    unit += count;
  }
}

void CopyEngine::work() {
  block_signals();
  MoverScratch scratch;
  std::vector<Operation> ended;
  std::unique_lock lock(mutex_);
  while (true) {
    work_or_stop_.wait(lock, [&] { return queue_.has_part() || (closed_ && queue_.empty()); });
    if (!queue_.has_part()) return;
    const CopyPart part = queue_.next_part();
    lock.unlock();
    int number = 0;
    std::string error;
    const int64_t begun = now_ns();
    try {
      copy(part, scratch);
    } catch (const CopyFault& fault) {
      number = fault.number;
      error = fault.what();
    } catch (const std::exception& fault) {
      error = std::string("copying: ") + fault.what();
    }
    const int64_t spent = now_ns() - begun;
    lock.lock();
    totals_.busy_ns += spent;
    queue_.part_done(part, number, error, ended);
    finish(ended);
    // What ended may let others begin, or the other threads end.
    if (!ended.empty()) work_or_stop_.notify_all();
    ended.clear();
  }
}

void CopyEngine::close() {
  std::vector<Operation> ended;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const Operation& operation : queue_.live()) queue_.cancel(operation, ended);
    finish(ended);
  }
  ended_.notify_all();
  work_or_stop_.notify_all();
  const std::lock_guard joining(joining_);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

CopyTotals CopyEngine::totals() {
  const std::lock_guard lock(mutex_);
  return totals_;
}

}  // namespace sgl_batch
