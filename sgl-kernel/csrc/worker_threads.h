// Owns what all threads of ours that work in the background begin with and measure by.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <cstdint>

namespace sgl_batch {

inline int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// Signals go to the threads that were there before, but for those that a thread brings upon itself.
inline void block_signals() {
  sigset_t signals;
  sigfillset(&signals);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&signals, own);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

}  // namespace sgl_batch
