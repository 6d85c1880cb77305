#include "norm_rope.h"

#include <algorithm>
#include <vector>

#include "rows.h"
#include "tasks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kNumbersPerTask = 16384;

int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, kNumbersPerTask / width); }

}  // namespace

void run_rms_norm(const RmsNormCall& c) {
  std::vector<float> weight(c.width), scratch(static_cast<size_t>(c.width) * num_threads());
  read_row(weight.data(), c.weight, c.weight_dtype, c.width);
  const NormRowFn norm_row = isa().norm_row;
  const size_t element = size_of(c.dtype);
  const int64_t rows = rows_per_task(c.width);
  run_tasks(divide_up(c.rows, rows), [&](int64_t task, int thread) {
    for (int64_t r = task * rows; r < std::min(c.rows, (task + 1) * rows); ++r) {
      const size_t at = static_cast<size_t>(r * c.width) * element;
      const bool adds = c.residual != nullptr;
      norm_row({static_cast<const char*>(c.x) + static_cast<size_t>(r * c.x_stride) * element,
                adds ? static_cast<const char*>(c.residual) + at : nullptr,
                adds ? static_cast<char*>(c.residual_out) + at : nullptr, static_cast<char*>(c.out) + at},
               weight.data(), c.eps, c.width, c.dtype, scratch.data() + c.width * thread);
    }
  });
}

namespace {

// Calls each(heads, cosine, sine, thread) for the heads of every row.
template <typename Each>
void for_each_row(const RotaryCall& c, const Each& each) {
  const int64_t half = c.rotary_dim / 2;
  const size_t element = size_of(c.dtype);
  std::vector<float> scratch(static_cast<size_t>(c.rotary_dim) * num_threads());
  const int64_t rows = rows_per_task(c.heads * c.head_dim);
  run_tasks(divide_up(c.rows, rows), [&](int64_t task, int thread) {
    float* cosine = scratch.data() + c.rotary_dim * thread;
    for (int64_t r = task * rows; r < std::min(c.rows, (task + 1) * rows); ++r) {
      const size_t angles = static_cast<size_t>(c.positions[r] * c.rotary_dim) * size_of(c.cos_sin_dtype);
      read_row(cosine, static_cast<const char*>(c.cos_sin) + angles, c.cos_sin_dtype, c.rotary_dim);
      each(static_cast<char*>(c.x) + static_cast<size_t>(r * c.x_stride) * element, cosine, cosine + half, thread);
    }
  });
}

}  // namespace

void run_rotary(const RotaryCall& c) {
  const RotateHeadFn rotate_head = isa().rotate_head;
  const size_t head_bytes = static_cast<size_t>(c.head_dim) * size_of(c.dtype);
  for_each_row(c, [&](char* place, const float* cosine, const float* sine, int) {
    for (int64_t head = 0; head < c.heads; ++head, place += head_bytes)
      rotate_head(place, cosine, sine, c.rotary_dim / 2, c.neox, c.dtype);
  });
}

void run_qk_norm_rope(const QkNormRopeCall& call) {
  const RotaryCall& c = call.heads;
  const int64_t width = c.head_dim;
  std::vector<float> q_weight(width), k_weight(width), scratch(static_cast<size_t>(width) * num_threads());
  read_row(q_weight.data(), call.q_weight, call.weight_dtype, width);
  read_row(k_weight.data(), call.k_weight, call.weight_dtype, width);
  const NormRotateHeadsFn norm_rotate_heads = isa().norm_rotate_heads;
  const size_t q_bytes = static_cast<size_t>(call.q_heads * width) * size_of(c.dtype);
  for_each_row(c, [&](char* heads, const float* cosine, const float* sine, int thread) {
    NormRotate one{width, c.rotary_dim / 2, q_weight.data(), call.eps, cosine, sine, c.neox, c.dtype};
    float* row = scratch.data() + width * thread;
    norm_rotate_heads(heads, call.q_heads, one, row);
    one.weight = k_weight.data();
    norm_rotate_heads(heads + q_bytes, c.heads - call.q_heads, one, row);
  });
}

}  // namespace sgl_batch
