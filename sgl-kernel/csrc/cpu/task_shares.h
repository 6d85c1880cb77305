// Owns which thread does which task: each has a share of neighbouring ones, and helps the others once it is through.
//
// Neighbouring tasks read the same rows, weights or pages, which then stay in the caches of one core. Cores that share no L3
// cache read each other's lines at a third of the rate of their own.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "gemm.h"

namespace sgl_batch {

// The tasks of thread t are [bounds[t], bounds[t + 1]).
using ShareBounds = std::vector<int64_t>;

inline int num_threads() { return omp_get_max_threads(); }

// As many tasks for each thread; no more threads than tasks.
inline ShareBounds equal_shares(int64_t count) {
  const int64_t threads = std::clamp<int64_t>(count, 1, num_threads());
  ShareBounds bounds(static_cast<size_t>(threads) + 1);
  for (int64_t thread = 0; thread <= threads; ++thread) bounds[static_cast<size_t>(thread)] = count * thread / threads;
  return bounds;
}

// As much work for each thread. In its share the blocks of long pieces come first, so that none is begun at the end; otherwise
// they stay in their order. `work` and `length` take a block.
template <typename Block, typename Work, typename Length>
ShareBounds share_blocks(std::vector<Block>& blocks, const Work& work, const Length& length) {
  const auto count = static_cast<int64_t>(blocks.size());
  const int64_t threads = std::clamp<int64_t>(count, 1, num_threads());
  int64_t all = 0, done = 0;
  for (const Block& block : blocks) all += work(block);
  ShareBounds bounds{0};
  for (int64_t at = 0; at < count; ++at) {
    const int64_t own = work(blocks[static_cast<size_t>(at)]);
    // A block across a bound goes to the share in which its middle lies.
    while (static_cast<int64_t>(bounds.size()) < threads &&
           (2 * done + own) * threads >= 2 * all * static_cast<int64_t>(bounds.size()))
      bounds.push_back(at);
    done += own;
  }
  while (static_cast<int64_t>(bounds.size()) <= threads) bounds.push_back(count);
  for (size_t thread = 0; thread + 1 < bounds.size(); ++thread)
    std::stable_sort(blocks.begin() + bounds[thread], blocks.begin() + bounds[thread + 1],
                     [&](const Block& a, const Block& b) { return length(a) > length(b); });
  return bounds;
}

// What is left of the threads' shares. There are fewer than 2^32 tasks.
class TaskShares {
 public:
  explicit TaskShares(const ShareBounds& bounds) : count_(bounds.back()), shares_(bounds.size() - 1) {
    for (size_t thread = 0; thread < shares_.size(); ++thread)
      shares_[thread].left.store(range(bounds[thread], bounds[thread + 1]), std::memory_order_relaxed);
  }

  // Returns the task that a thread does next, or the number of all tasks if none is left: the first one of its own, else the
  // last one of the thread that has most left.
  int64_t take(int thread) {
    std::atomic<uint64_t>& own = shares_[static_cast<size_t>(thread)].left;
    for (uint64_t left = own.load(std::memory_order_relaxed); size(left) > 0;)
      if (own.compare_exchange_weak(left, range(first(left) + 1, end(left)), std::memory_order_relaxed)) return first(left);
    for (;;) {
      std::atomic<uint64_t>* most = nullptr;
      uint64_t left = 0;
      for (Share& share : shares_) {
        const uint64_t found = share.left.load(std::memory_order_relaxed);
        if (size(found) > size(left)) most = &share.left, left = found;
      }
      if (most == nullptr) return count_;
      if (most->compare_exchange_weak(left, range(first(left), end(left) - 1), std::memory_order_relaxed)) return end(left) - 1;
    }
  }

 private:
  // Tasks [first, end), in a word that threads change together.
  static uint64_t range(int64_t first, int64_t end) { return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end); }
  static int64_t first(uint64_t range) { return static_cast<int64_t>(range >> 32); }
  static int64_t end(uint64_t range) { return static_cast<int64_t>(range & 0xffffffff); }
  static int64_t size(uint64_t range) { return end(range) - first(range); }

  struct alignas(2 * kLineBytes) Share {
    std::atomic<uint64_t> left{0};
  };

  const int64_t count_;
  std::vector<Share> shares_;
};

// Calls task(index, next, thread) for every index below the last bound; `next` is the one that the same thread takes after it,
// or that bound. Threads are numbered from 0 below num_threads().
template <typename Task>
void run_tasks_ahead(const ShareBounds& bounds, const Task& task) {
  const int64_t count = bounds.back();
  if (bounds.size() == 2) {
    for (int64_t index = 0; index < count; ++index) task(index, index + 1, 0);
    return;
  }
  TaskShares shares(bounds);
#pragma omp parallel num_threads(static_cast<int>(bounds.size() - 1))
  {
    const int thread = omp_get_thread_num();
    for (int64_t index = shares.take(thread); index < count;) {
      const int64_t next = shares.take(thread);
      task(index, next, thread);
      index = next;
    }
  }
}

// The same for who does not care what follows: task(index, thread). No task is claimed before it begins.
template <typename Task>
void run_tasks(const ShareBounds& bounds, const Task& task) {
  const int64_t count = bounds.back();
  if (bounds.size() == 2) {
    for (int64_t index = 0; index < count; ++index) task(index, 0);
    return;
  }
  TaskShares shares(bounds);
#pragma omp parallel num_threads(static_cast<int>(bounds.size() - 1))
  {
    const int thread = omp_get_thread_num();
    for (int64_t index = shares.take(thread); index < count; index = shares.take(thread)) task(index, thread);
  }
}

// Over [0, count), in equal shares.
template <typename Task>
void run_tasks_ahead(int64_t count, const Task& task) {
  run_tasks_ahead(equal_shares(count), task);
}
template <typename Task>
void run_tasks(int64_t count, const Task& task) {
  run_tasks(equal_shares(count), task);
}

}  // namespace sgl_batch
