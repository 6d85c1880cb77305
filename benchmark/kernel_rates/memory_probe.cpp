// Owns what benchmark/cpu_kernels.py measures of memory that no operator of torch does: how quickly cores read runs of bytes in a
// given order and do nothing else, and how quickly two of them hand a cache line to each other.
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kLineBytes = 64;

volatile uint64_t seen;

// Reads runs [first, end) of `order`. Of the next run every `ask`th line is asked for early, or none.
void read_some(const char* memory, const int64_t* order, int64_t first, int64_t end, int64_t bytes, int64_t ask) {
  uint64_t sums[kLineBytes / 8] = {};
  for (int64_t at = first; at < end; ++at) {
    const char* run = memory + order[at] * bytes;
    const char* next = memory + order[at + 1 < end ? at + 1 : at] * bytes;
    for (int64_t line = 0; line < bytes; line += kLineBytes) {
      if (ask > 0 && line % (ask * kLineBytes) == 0) __builtin_prefetch(next + line, 0, 2);
      uint64_t words[kLineBytes / 8];
      std::memcpy(words, run + line, kLineBytes);
      for (int64_t i = 0; i < kLineBytes / 8; ++i) sums[i] |= words[i];
    }
  }
  for (const uint64_t sum : sums) seen = sum;
}

void stay_on(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

extern "C" {

// Reads `count` runs of `bytes` each, a multiple of 64: the numbers in `order` of those in `memory`.
void read_runs(const char* memory, const int64_t* order, int64_t count, int64_t bytes, int64_t ask, int threads) {
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread)
    all.emplace_back(read_some, memory, order, count * thread / threads, count * (thread + 1) / threads, bytes, ask);
  for (std::thread& thread : all) thread.join();
}

// Two cores hand one line to each other, `times` times there and back.
void exchange_line(int first_cpu, int second_cpu, int64_t times) {
  alignas(2 * kLineBytes) std::atomic<int64_t> turn{0};
  const auto take_turns = [&](int cpu, int64_t own) {
    stay_on(cpu);
    for (int64_t i = 0; i < times; ++i) {
      while (turn.load(std::memory_order_acquire) != 2 * i + own) {
      }
      turn.store(2 * i + own + 1, std::memory_order_release);
    }
  };
  std::thread other(take_turns, second_cpu, 1);
  std::thread(take_turns, first_cpu, 0).join();
  other.join();
}
}
