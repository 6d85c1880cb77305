#include "rows.h"

#include <cstring>

#include "clones.h"

namespace sgl_batch {

SGL_BATCH_CLONES void add_row(float* __restrict to, const float* __restrict from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

SGL_BATCH_CLONES void read_row(float* to, const void* from, DType dtype, int64_t count) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * 4);
    return;
  }
  const auto* in = static_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = bf16_to_f32(in[i]);
}

SGL_BATCH_CLONES void write_row(void* to, DType dtype, const float* from, int64_t count) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * 4);
    return;
  }
  auto* out = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = f32_to_bf16(from[i]);
}

void spread_row(void* to, int64_t block, const void* from, int64_t bytes) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  if (block != kLineBytes)
    for (; bytes >= kLineBytes; bytes -= kLineBytes, in += kLineBytes, out += block) std::memcpy(out, in, kLineBytes);
  if (bytes > 0) std::memcpy(out, in, static_cast<size_t>(bytes));
}

void convert_row(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t count) {
  if (to_dtype == DType::kF32)
    read_row(static_cast<float*>(to), from, from_dtype, count);
  else if (from_dtype == DType::kF32)
    write_row(to, to_dtype, static_cast<const float*>(from), count);
  else
    std::memcpy(to, from, static_cast<size_t>(count) * 2);
}

}  // namespace sgl_batch
