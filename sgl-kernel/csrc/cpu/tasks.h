// Owns how large tasks are and how they are shared among threads: each takes the next one until none is left.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace sgl_batch {

constexpr int64_t kTilesPerBlock = 8;  // rows that share one pass over a panel: their tiles stay in the L2 cache
constexpr int64_t kTasksPerThread = 4;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int num_threads() { return omp_get_max_threads(); }

// Calls task(index, thread) for every index in [0, count); threads are numbered from 0 below num_threads().
template <typename Task>
void run_tasks(int64_t count, const Task& task) {
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), count));
  if (threads <= 1) {
    for (int64_t index = 0; index < count; ++index) task(index, 0);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    for (int64_t index = next.fetch_add(1); index < count; index = next.fetch_add(1)) task(index, thread);
  }
}

}  // namespace sgl_batch
