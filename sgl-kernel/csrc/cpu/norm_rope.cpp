#include "norm_rope.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "clones.h"
#include "rows.h"
#include "tasks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kRowsPerTask = 16;
constexpr int kLanes = 16;


// Sixteen partial sums, one for each index modulo sixteen, added up in ascending order.
SGL_BATCH_CLONES float sum_of_squares(const float* row, int64_t count) {
  float lanes[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] += row[i + j] * row[i + j];
  for (int64_t i = whole; i < count; ++i) lanes[i - whole] += row[i] * row[i];
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

SGL_BATCH_CLONES void scale_by(float* row, float factor, const float* weight, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] = row[i] * factor * weight[i];
}

SGL_BATCH_CLONES void rotate_halves(float* __restrict low, float* __restrict high, const float* cosine,
                                    const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = low[i], b = high[i];
    low[i] = a * cosine[i] - b * sine[i];
    high[i] = b * cosine[i] + a * sine[i];
  }
}

void rotate_pairs(float* row, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = row[2 * i], b = row[2 * i + 1];
    row[2 * i] = a * cosine[i] - b * sine[i];
    row[2 * i + 1] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace

void run_rms_norm(const RmsNormCall& c) {
  std::vector<float> weight(c.width);
  read_row(weight.data(), c.weight, c.weight_dtype, c.width);
  std::vector<float> scratch(static_cast<size_t>(2 * c.width) * num_threads());
  const size_t element = size_of(c.dtype);
  run_tasks(divide_up(c.rows, kRowsPerTask), [&](int64_t task, int thread) {
    float* row = scratch.data() + 2 * c.width * thread;
    float* other = row + c.width;
    for (int64_t r = task * kRowsPerTask; r < std::min(c.rows, (task + 1) * kRowsPerTask); ++r) {
      const size_t at = static_cast<size_t>(r * c.width) * element;
      read_row(row, static_cast<const char*>(c.x) + static_cast<size_t>(r * c.x_stride) * element, c.dtype, c.width);
      if (c.residual != nullptr) {
        read_row(other, static_cast<const char*>(c.residual) + at, c.dtype, c.width);
        add_row(row, other, c.width);
        write_row(static_cast<char*>(c.residual_out) + at, c.dtype, row, c.width);
      }
      const float mean = sum_of_squares(row, c.width) / static_cast<float>(c.width);
      scale_by(row, 1.0f / std::sqrt(mean + c.eps), weight.data(), c.width);
      write_row(static_cast<char*>(c.out) + at, c.dtype, row, c.width);
    }
  });
}

void run_rotary(const RotaryCall& c) {
  const int64_t half = c.rotary_dim / 2;
  const size_t element = size_of(c.dtype);
  std::vector<float> scratch(static_cast<size_t>(2 * c.rotary_dim) * num_threads());
  run_tasks(divide_up(c.rows, kRowsPerTask), [&](int64_t task, int thread) {
    float* row = scratch.data() + 2 * c.rotary_dim * thread;
    float* cosine = row + c.rotary_dim;
    for (int64_t r = task * kRowsPerTask; r < std::min(c.rows, (task + 1) * kRowsPerTask); ++r) {
      const size_t angles = static_cast<size_t>(c.positions[r] * c.rotary_dim) * size_of(c.cos_sin_dtype);
      read_row(cosine, static_cast<const char*>(c.cos_sin) + angles, c.cos_sin_dtype, c.rotary_dim);
      for (int64_t head = 0; head < c.heads; ++head) {
        char* place = static_cast<char*>(c.x) + static_cast<size_t>(r * c.x_stride + head * c.head_dim) * element;
        read_row(row, place, c.dtype, c.rotary_dim);
        if (c.neox)
          rotate_halves(row, row + half, cosine, cosine + half, half);
        else
          rotate_pairs(row, cosine, cosine + half, half);
        write_row(place, c.dtype, row, c.rotary_dim);
      }
    }
  });
}

}  // namespace sgl_batch
