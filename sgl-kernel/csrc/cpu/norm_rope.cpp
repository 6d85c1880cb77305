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

// Calls before(head, place, thread) for every head, then rotates it.
template <typename Before>
void rotate_rows(const RotaryCall& c, const Before& before) {
  const int64_t half = c.rotary_dim / 2;
  const RotateHeadFn rotate_head = isa().rotate_head;
  const size_t element = size_of(c.dtype);
  std::vector<float> scratch(static_cast<size_t>(c.rotary_dim) * num_threads());
  const int64_t rows = rows_per_task(c.heads * c.head_dim);
  run_tasks(divide_up(c.rows, rows), [&](int64_t task, int thread) {
    float* cosine = scratch.data() + c.rotary_dim * thread;
    for (int64_t r = task * rows; r < std::min(c.rows, (task + 1) * rows); ++r) {
      const size_t angles = static_cast<size_t>(c.positions[r] * c.rotary_dim) * size_of(c.cos_sin_dtype);
      read_row(cosine, static_cast<const char*>(c.cos_sin) + angles, c.cos_sin_dtype, c.rotary_dim);
      for (int64_t head = 0; head < c.heads; ++head) {
        char* place = static_cast<char*>(c.x) + static_cast<size_t>(r * c.x_stride + head * c.head_dim) * element;
        before(head, place, thread);
        rotate_head(place, cosine, cosine + half, half, c.neox, c.dtype);
      }
    }
  });
}

}  // namespace

void run_rotary(const RotaryCall& c) {
  rotate_rows(c, [](int64_t, void*, int) {});
}

void run_qk_norm_rope(const QkNormRopeCall& c) {
  const int64_t width = c.heads.head_dim;
  std::vector<float> q_weight(width), k_weight(width), scratch(static_cast<size_t>(width) * num_threads());
  read_row(q_weight.data(), c.q_weight, c.weight_dtype, width);
  read_row(k_weight.data(), c.k_weight, c.weight_dtype, width);
  const NormRowFn norm_row = isa().norm_row;
  rotate_rows(c.heads, [&](int64_t head, void* place, int thread) {
    norm_row({place, nullptr, nullptr, place}, (head < c.q_heads ? q_weight : k_weight).data(), c.eps, width, c.heads.dtype,
             scratch.data() + width * thread);
  });
}

}  // namespace sgl_batch
