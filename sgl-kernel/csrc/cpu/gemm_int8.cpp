#include "gemm_int8.h"

#include <cstring>

#include "amx_tiles.h"

namespace sgl_batch {
namespace {

const Int8Kernel& choose() {
#if defined(__x86_64__)
  const char* name = isa().name;
  __builtin_cpu_init();
  if (std::strcmp(name, "amx_bf16") == 0 && int8_tiles_are_there()) return kAmxInt8;
  const bool avx512 = std::strncmp(name, "avx512", 6) == 0 || std::strcmp(name, "amx_bf16") == 0;
  if (avx512 && __builtin_cpu_supports("avx512vnni")) return kAvx512VnniInt8;
  // Without VNNI, vectors of 64 bytes gain nothing over those of 32.
  if (avx512 || std::strcmp(name, "avx2") == 0) return kAvx2Int8;
#endif
  return kPortableInt8;
}

}  // namespace

const Int8Kernel& int8_kernel() {
  static const Int8Kernel& chosen = choose();
  return chosen;
}

}  // namespace sgl_batch
