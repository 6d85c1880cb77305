// Owns the queue of copies: see copy_queue.h.
#include "copy_queue.h"

#include <algorithm>
#include <new>

#include "slot_table.h"

namespace sgl_batch {
namespace {

// So much is copied between two looks at the queue.
constexpr int64_t kPartBytes = 1 << 20;

// Claimed only where it is written.
auto zeros(int64_t count) {
  auto* numbers = static_cast<uint64_t*>(std::calloc(static_cast<size_t>(count), sizeof(uint64_t)));
  if (numbers == nullptr) throw std::bad_alloc();
  return std::unique_ptr<uint64_t[], decltype(&std::free)>(numbers, &std::free);
}

}  // namespace

CopyQueue::CopyQueue(int64_t num_pages, int64_t num_slots, int64_t most_operations, int64_t most_bytes, int64_t unit_bytes)
    : most_operations_(most_operations),
      most_bytes_(most_bytes),
      unit_bytes_(unit_bytes),
      page_last_(zeros(num_pages)),
      slot_last_(zeros(num_slots)),
      page_check_(zeros(num_pages)),
      slot_check_(zeros(num_slots)) {}

void CopyQueue::check_targets(const CopyOperation& operation) {
  const auto& targets = operation.to_slots ? operation.slots : operation.pages;
  auto& met = operation.to_slots ? slot_check_ : page_check_;
  ++last_check_;
  for (const int64_t target : targets) {
    if (met[target] == last_check_)
      throw StoreFault(std::string(operation.to_slots ? "slot " : "device page ") + std::to_string(target) +
                      " stands twice among the targets of one copy");
    met[target] = last_check_;
  }
}

void CopyQueue::follow(const Operation& operation, uint64_t& last) {
  const uint64_t before = last;
  last = operation->number;
  if (before == 0 || before == operation->number) return;
  const auto found = live_.find(before);
  if (found == live_.end()) return;
  auto& followers = found->second->followers;
  // The pages of a batch mostly belong to one batch before: it is met again and again in a row.
  if (!followers.empty() && followers.back() == operation) return;
  followers.push_back(operation);
  ++operation->blockers;
}

void CopyQueue::enter(const Operation& operation) {
  check_targets(*operation);
  operation->number = ++last_number_;
  for (const int64_t page : operation->pages) follow(operation, page_last_[page]);
  for (const int64_t slot : operation->slots) follow(operation, slot_last_[slot]);
  live_.emplace(operation->number, operation);
  bytes_ += operation->bytes;
  if (operation->blockers == 0) ready_.push_back(operation);
}

CopyPart CopyQueue::next_part() {
  Operation operation = ready_.front();
  int64_t units = std::max<int64_t>(1, kPartBytes / unit_bytes_);
  // Whole pages where they are small: their layers lie together in a file.
  if (operation->num_layers > 0 && units > operation->num_layers) units -= units % operation->num_layers;
  const int64_t first = operation->next_unit, last = std::min(operation->num_units(), first + units);
  operation->next_unit = last;
  ++operation->running;
  if (last == operation->num_units()) ready_.pop_front();
  return {std::move(operation), first, last};
}

void CopyQueue::drop_rest(const Operation& operation) {
  if (operation->next_unit < operation->num_units() && operation->blockers == 0)
    ready_.erase(std::find(ready_.begin(), ready_.end(), operation));
  operation->next_unit = operation->num_units();
}

void CopyQueue::part_done(const CopyPart& part, int error_number, const std::string& error,
                          std::vector<Operation>& ended) {
  const Operation& operation = part.operation;
  --operation->running;
  if (!error.empty() && operation->fate != CopyEnd::kFailed) {
    drop_rest(operation);
    operation->fate = CopyEnd::kFailed;
    operation->error_number = error_number;
    operation->error = error;
  }
  end_if_over(operation, ended);
}

bool CopyQueue::cancel(const Operation& operation, std::vector<Operation>& ended) {
  if (operation->next_unit == operation->num_units()) return false;
  drop_rest(operation);
  operation->fate = CopyEnd::kCancelled;
  end_if_over(operation, ended);
  return true;
}

void CopyQueue::end_if_over(Operation operation, std::vector<Operation>& ended) {
  std::vector<Operation> over{std::move(operation)};
  while (!over.empty()) {
    const Operation next = std::move(over.back());
    over.pop_back();
    if (next->blockers > 0 || next->running > 0 || next->next_unit < next->num_units()) continue;
    live_.erase(next->number);
    bytes_ -= next->bytes;
    for (Operation& follower : next->followers) {
      if (--follower->blockers > 0) continue;
      if (follower->next_unit < follower->num_units())
        ready_.push_back(std::move(follower));
      else
        over.push_back(std::move(follower));
    }
    next->followers.clear();
    ended.push_back(next);
  }
}

std::vector<Operation> CopyQueue::live() const {
  std::vector<Operation> all;
  for (const auto& [number, operation] : live_) all.push_back(operation);
  return all;
}

}  // namespace sgl_batch
