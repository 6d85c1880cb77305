// Owns the choice of an instruction set: the best that the machine has, or what SGL_BATCH_ISA names.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx_tiles.h"
#include "gemm.h"

namespace sgl_batch {
namespace {

#if defined(__x86_64__)
// Whether fp8 is taken to bf16 by tables. All processors with AVX512-BF16 but those of one generation have them.
bool has_byte_tables() { return __builtin_cpu_supports("avx512vbmi"); }

const Isa& avx512_with_tables() {
  static const Isa composed = [] {
    Isa isa = kAvx512Bf16;
    if (has_byte_tables()) isa.tile_bf16.run_fp8 = kFp8Avx512Vbmi.run, isa.decode_fp8 = kFp8Avx512Vbmi.decode;
    return isa;
  }();
  return composed;
}

// AVX512-BF16 whose weights are widened to meet rows of f32: its instructions round to bf16, and multiply nothing.
const Isa& avx512_widened() {
  static const Isa composed = [] {
    Isa isa = avx512_with_tables();
    isa.name = "avx512_widened";
    isa.bf16_pairs = kAvx512.bf16_pairs;
    isa.tile_bf16 = kAvx512.tile_bf16;
    if (has_byte_tables()) isa.tile_bf16.run_fp8 = kFp8Avx512Vbmi.run_widened;
    isa.softmax_step = kAvx512.softmax_step;
    return isa;
  }();
  return composed;
}

// AVX512-BF16 with a tile of its own for bf16 weights.
const Isa& amx_bf16() {
  static const Isa composed = [] {
    Isa isa = avx512_with_tables();
    isa.name = "amx_bf16";
    isa.tile_bf16 = kAmxBf16Tile;
    return isa;
  }();
  return composed;
}

// Whether a core does four multiply-adds of f32 in the time of one dot product of bf16 pairs, so that a weight is best widened:
// Intel's cores with AMX, which leave bf16 to it, also where the system does not offer it. They are those with fp16.
bool widening_pays() { return __builtin_cpu_is("intel") && __builtin_cpu_supports("avx512fp16"); }
#endif

// Best first.
std::vector<const Isa*> runnable() {
  std::vector<const Isa*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  static const bool amx_bf16_tiles = avx512_bf16 && tiles_are_usable();
  if (amx_bf16_tiles) found.push_back(&amx_bf16());
  if (avx512_bf16) {
    found.push_back(widening_pays() ? &avx512_widened() : &avx512_with_tables());
    found.push_back(widening_pays() ? &avx512_with_tables() : &avx512_widened());
  }
  if (avx512) found.push_back(&kAvx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

const std::string& names() {
  static const std::string joined = [] {
    std::string text;
    for (const Isa* candidate : runnable()) text += (text.empty() ? "" : ",") + std::string(candidate->name);
    return text;
  }();
  return joined;
}

const Isa& choose() {
  const auto candidates = runnable();
  const char* wanted = std::getenv("SGL_BATCH_ISA");
  if (wanted == nullptr || *wanted == '\0') return *candidates.front();
  for (const Isa* candidate : candidates)
    if (std::string(wanted) == candidate->name) return *candidate;
  throw std::runtime_error("SGL_BATCH_ISA is '" + std::string(wanted) + "'; this machine runs " + names() +
                           ": name one of these, or unset it");
}

}  // namespace

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

const char* runnable_isas() { return names().c_str(); }

}  // namespace sgl_batch
