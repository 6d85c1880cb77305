// Owns copying memory past the caches: what is copied to or from a store is next read by somebody else, much later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sgl_batch {

#if defined(__x86_64__)

// SSE2, which every such machine has; the memory is the limit, not the width of a register. To be followed by a fence
// before another thread may look.
inline void stream_copy(void* to, const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(target, source, bytes);
    return;
  }
  std::memcpy(target, source, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* line = reinterpret_cast<const __m128i*>(source + at);
    auto* there = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1), c = _mm_loadu_si128(line + 2),
                  d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(there, a);
    _mm_stream_si128(there + 1, b);
    _mm_stream_si128(there + 2, c);
    _mm_stream_si128(there + 3, d);
  }
  std::memcpy(target + at, source + at, bytes - at);
}

inline void stream_fence() { _mm_sfence(); }

#else

inline void stream_copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void stream_fence() {}

#endif

}  // namespace sgl_batch
