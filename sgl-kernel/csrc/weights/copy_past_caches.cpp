#include "copy_past_caches.h"

#include <algorithm>
#include <cstring>

#include "../cpu/tasks.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace sgl_batch {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;

#if defined(__x86_64__)
void copy_piece(const char* from, char* to, int64_t bytes) {
  constexpr int64_t kVector = sizeof(__m128i), kLine = 4 * kVector;
  const int64_t head = std::min<int64_t>(-reinterpret_cast<intptr_t>(to) & (kLine - 1), bytes);
  const int64_t end = head + (bytes - head) / kLine * kLine;
  std::memcpy(to, from, static_cast<size_t>(head));
  for (int64_t line = head; line < end; line += kLine) {
    __m128i own[4];
    for (int i = 0; i < 4; ++i) own[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + line + i * kVector));
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + line + i * kVector), own[i]);
  }
  std::memcpy(to + end, from + end, static_cast<size_t>(bytes - end));
  _mm_sfence();  // another thread may read it next
}
#else
void copy_piece(const char* from, char* to, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }
#endif

}  // namespace

void copy_past_caches(const void* from, void* to, int64_t bytes) {
  run_tasks(divide_up(bytes, kPieceBytes), [&](int64_t piece, int) {
    const int64_t begin = piece * kPieceBytes;
    copy_piece(static_cast<const char*>(from) + begin, static_cast<char*>(to) + begin, std::min(kPieceBytes, bytes - begin));
  });
}

}  // namespace sgl_batch
