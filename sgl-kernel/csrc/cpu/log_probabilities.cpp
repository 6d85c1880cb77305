// Owns the log probabilities of each row of logits: of one given token, and of the likeliest ones. No row of all of them is
// written to memory: a row's logits are read three times, the last two from the cache.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "clones.h"
#include "number_keys.h"
#include "power_of_e.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kBlock = 128;  // numbers that are passed over together where none of them can be among the largest

SGL_BATCH_CLONES void largest_of_blocks(const uint32_t* row, int64_t count, int32_t* largest) {
  for (int64_t begin = 0; begin < count; begin += kBlock, ++largest) {
    int32_t own = key_of(row[begin]);
    const int64_t end = std::min(count, begin + kBlock);
#pragma omp simd reduction(max : own)
    for (int64_t i = begin; i < end; ++i) {
      const int32_t key = key_of(row[i]);
      own = key > own ? key : own;
    }
    *largest = own;
  }
}

// Of e to the power of each number's distance to the largest one, times a factor.
SGL_BATCH_CLONES double sum_of_powers(const float* row, int64_t count, float largest, float factor) {
  double all = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    float own = 0;
    const int64_t end = std::min(count, begin + kBlock);
#pragma omp simd reduction(+ : own)
    for (int64_t i = begin; i < end; ++i) own += exp_of((row[i] - largest) * factor);
    all += static_cast<double>(own);
  }
  return all;
}

struct Candidate {
  int32_t key, token;
};
// Descending, equal ones by token.
bool comes_before(const Candidate& one, const Candidate& other) {
  return one.key != other.key ? one.key > other.key : one.token < other.token;
}

// What a thread needs for a row.
struct Scratch {
  std::vector<int32_t> blocks, sorted;  // the largest key of each block
  std::vector<Candidate> candidates;
};

class Row {
 public:
  Row(const float* logits, int64_t count, float factor, Scratch& scratch)
      : logits_(logits), count_(count), factor_(factor), scratch_(scratch) {
    scratch.blocks.resize(static_cast<size_t>(divide_up(count, kBlock)));
    largest_of_blocks(bits(), count, scratch.blocks.data());
    const int32_t key = *std::max_element(scratch.blocks.begin(), scratch.blocks.end());
    largest_ = key == kNanKey ? std::numeric_limits<float>::quiet_NaN() : std::bit_cast<float>(bits_of_key(key));
    log_sum_ = static_cast<float>(std::log(sum_of_powers(logits, count, largest_, factor)));
  }

  float largest() const { return largest_; }
  float log_sum() const { return log_sum_; }
  // Without a value, NaN, where a logit of the row is NaN or infinity, or all are minus infinity.
  float of(int64_t token) const { return (logits_[token] - largest_) * factor_ - log_sum_; }

  // The `top` likeliest tokens, which may not be more than there are.
  const Candidate* likeliest(int64_t top) {
    std::vector<Candidate>& found = scratch_.candidates;
    found.clear();
    const int32_t least = least_key(top);
    for (size_t b = 0; b < scratch_.blocks.size(); ++b) {
      if (scratch_.blocks[b] < least) continue;
      const int64_t begin = static_cast<int64_t>(b) * kBlock, end = std::min(count_, begin + kBlock);
      for (int64_t i = begin; i < end; ++i)
        if (const int32_t key = key_of(bits()[i]); key >= least) found.push_back({key, static_cast<int32_t>(i)});
    }
    std::partial_sort(found.begin(), found.begin() + top, found.end(), comes_before);
    return found.data();
  }

 private:
  const uint32_t* bits() const { return reinterpret_cast<const uint32_t*>(logits_); }

  // None of the `top` largest is below it: as many blocks have a number as large as that.
  int32_t least_key(int64_t top) {
    if (top > static_cast<int64_t>(scratch_.blocks.size())) return std::numeric_limits<int32_t>::min();
    scratch_.sorted = scratch_.blocks;
    const auto last = scratch_.sorted.begin() + (top - 1);
    std::nth_element(scratch_.sorted.begin(), last, scratch_.sorted.end(), std::greater<>());
    return *last;
  }

  const float* logits_;
  int64_t count_;
  float factor_, largest_ = 0, log_sum_ = 0;
  Scratch& scratch_;
};

using Found = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Found log_probabilities(const at::Tensor& logits, const at::Tensor& tokens, int64_t top, const std::optional<at::Tensor>& temperatures) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1, "logits are ",
              logits.scalar_type(), logits.sizes(), " with strides ", logits.strides(),
              "; use float32, in contiguous rows of at least one number");
  const int64_t rows = logits.size(0), count = logits.size(1), stride = logits.stride(0);
  TORCH_CHECK(count <= std::numeric_limits<int32_t>::max(), "logits have ", count, " numbers a row; at most 2**31 - 1");
  TORCH_CHECK(top >= 0 && top <= count, "top is ", top, "; it is from 0 to the ", count, " numbers of a row");
  TORCH_CHECK(tokens.scalar_type() == at::kLong && tokens.is_contiguous() && tokens.numel() == rows, "tokens are ",
              tokens.scalar_type(), tokens.sizes(), "; use contiguous int64, one for each of ", rows, " rows");
  const bool has_factors = temperatures && temperatures->scalar_type() == at::kFloat && temperatures->is_contiguous();
  TORCH_CHECK(!temperatures || (has_factors && temperatures->numel() == rows),
              "temperatures are not contiguous float32, one for each of ", rows, " rows");
  const auto* token = tokens.data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row)
    TORCH_CHECK(token[row] >= 0 && token[row] < count, "token ", token[row], " of row ", row, " is not one of ", count);
  const float* const temperature = temperatures ? temperatures->data_ptr<float>() : nullptr;
  auto of_tokens = at::empty({rows}, logits.options()), values = at::empty({rows, top}, logits.options());
  auto likeliest = at::empty({rows, top}, tokens.options());
  auto largest = at::empty({rows}, logits.options()), log_sums = at::empty({rows}, logits.options());
  const auto* from = logits.data_ptr<float>();
  auto *of_token = of_tokens.data_ptr<float>(), *value = values.data_ptr<float>();
  auto* to = likeliest.data_ptr<int64_t>();
  auto *most = largest.data_ptr<float>(), *log_sum = log_sums.data_ptr<float>();
  run_tasks(rows, [&](int64_t row, int) {
    static thread_local Scratch scratch;
    Row own(from + row * stride, count, temperature == nullptr ? 1.0f : 1.0f / temperature[row], scratch);
    of_token[row] = own.of(token[row]);
    most[row] = own.largest();
    log_sum[row] = own.log_sum();
    if (top == 0) return;
    const Candidate* best = own.likeliest(top);
    for (int64_t i = 0; i < top; ++i) {
      value[row * top + i] = own.of(best[i].token);
      to[row * top + i] = best[i].token;
    }
  });
  return {of_tokens, values, likeliest, largest, log_sums};
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("log_probabilities(Tensor logits, Tensor tokens, int top, Tensor? temperatures=None) -> "
              "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) { library.impl("log_probabilities", sgl_batch::log_probabilities); }
