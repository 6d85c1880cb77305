// Owns the AMX instructions that the kernels use, a function each, and whether this process may use them. It decides
// neither what is multiplied nor how tiles are configured.
//
// They are assembly of our own: the compiler's functions for them do not say that they read memory, so that what was
// stored just before might come too late. The assembler alone must know them (binutils 2.34 or newer); the compiler
// needs no flags and may not use anything beyond its baseline here, so that nothing leaks to lesser machines.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>

namespace sgl_batch {
namespace {

// Palette 1: eight tiles of at most so many rows of so many bytes.
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// As the instruction reads it. A tile with no rows and no bytes is not there.
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64 && offsetof(TileConfig, row_bytes) == 16 && offsetof(TileConfig, rows) == 48);

// Configures this thread's tiles; all become zero.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
// As if they had never been configured.
inline void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int to>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(to) : "memory");
}

// Rows of memory begin `stride` bytes apart.
template <int to>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(to) : "memory");
}
// Likewise, of memory that is read once: the first cache keeps what it has.
template <int to>
inline void load_passing_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(to) : "memory");
}
template <int from>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(from) : "memory");
}

// sum += a x b: rows of pairs of bf16 times pairs of rows, as a panel has them.
template <int sum, int a, int b>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b) : "memory");
}

// Likewise: rows of four signed bytes times four rows of unsigned ones, in int32.
template <int sum, int a, int b>
inline void multiply_byte_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b) : "memory");
}

// Whether the instructions are done in software, by who defines this: a test where the processor lacks them.
#ifdef SGL_BATCH_EMULATED_AMX
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

// Whether the processor has tiles of bytes; whether they are usable is up to those of bf16.
inline bool int8_tiles_are_there() {
  if (kEmulated) return true;
  constexpr unsigned kInt8 = 1u << 25;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kInt8) != 0;
}

// Whether the processor has bf16 tiles and the system saves them when it switches threads.
inline bool tiles_are_there() {
  constexpr unsigned kOsXsave = 1u << 27, kBf16 = 1u << 22, kTile = 1u << 24, kSaved = 3u << 17;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kOsXsave) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kSaved) == kSaved;
}

// Whether this process may use bf16 tiles. Linux grants them on request, for all threads of the process at once and those
// to come; the request is refused where a thread has too small a stack for signals.
inline bool tiles_are_usable() {
  if (kEmulated) return true;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return tiles_are_there() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace
}  // namespace sgl_batch
#endif
