// Owns what changes logits before a token is chosen: tokens that a grammar does not allow, and penalties for repeated ones.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "clones.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kBits = 32;  // of a word
constexpr int64_t kWordsPerTask = 512;
constexpr int64_t kNumbersPerTask = kWordsPerTask * kBits;

// Of bf16 the upper half of the same bits.
template <typename Number>
constexpr Number kMinusInfinity = static_cast<Number>(sizeof(Number) == 4 ? 0xff800000u : 0xff80u);

template <typename Number>
[[gnu::always_inline]] inline void mask(Number* logits, const uint32_t* words, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += kBits, ++words) {
    const uint32_t word = *words;
    if (count - begin < kBits) {
      for (int64_t i = begin; i < count; ++i)
        if ((word >> (i - begin) & 1u) == 0) logits[i] = kMinusInfinity<Number>;
      return;
    }
#pragma omp simd
    for (uint32_t i = 0; i < kBits; ++i) logits[begin + i] = (word >> i & 1u) != 0 ? logits[begin + i] : kMinusInfinity<Number>;
  }
}

SGL_BATCH_CLONES void mask_f32(uint32_t* logits, const uint32_t* words, int64_t count) { mask(logits, words, count); }
SGL_BATCH_CLONES void mask_bf16(uint16_t* logits, const uint32_t* words, int64_t count) { mask(logits, words, count); }

SGL_BATCH_CLONES void penalize(float* logits, const float* penalties, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float up = logits[i] * penalties[i], down = logits[i] / penalties[i];
    logits[i] = logits[i] < 0 ? up : down;
  }
}

void mask_tokens(at::Tensor& logits, const at::Tensor& allowed) {
  TORCH_CHECK(logits.dim() == 2 && (logits.size(1) == 0 || logits.stride(1) == 1), "logits are ", logits.sizes(),
              " with strides ", logits.strides(), "; rows are contiguous");
  check(allowed, 2, "allowed");
  TORCH_CHECK(allowed.scalar_type() == at::kInt && allowed.size(0) == logits.size(0), "allowed is ", allowed.scalar_type(),
              allowed.sizes(), " for ", logits.size(0), " rows; use int32, a bit for each token of each row");
  const DType dtype = dtype_of(logits, "logits");
  const int64_t words = allowed.size(1), count = std::min(logits.size(1), words * kBits);
  const int64_t size = static_cast<int64_t>(size_of(dtype)), stride = logits.stride(0) * size;
  auto* numbers = static_cast<char*>(logits.data_ptr());
  const auto* bits = reinterpret_cast<const uint32_t*>(allowed.data_ptr<int32_t>());
  const int64_t tasks = divide_up(count, kNumbersPerTask);
  run_tasks(logits.size(0) * tasks, [&](int64_t task, int) {
    const int64_t row = task / tasks, word = task % tasks * kWordsPerTask, begin = word * kBits;
    const int64_t own = std::min(kNumbersPerTask, count - begin);
    void* const to = numbers + row * stride + begin * size;
    const uint32_t* const from = bits + row * words + word;
    if (dtype == DType::kF32) mask_f32(static_cast<uint32_t*>(to), from, own);
    else mask_bf16(static_cast<uint16_t*>(to), from, own);
  });
}

void penalize_repetition(at::Tensor& logits, const at::Tensor& penalties) {
  check(logits, 2, "logits");
  check(penalties, 2, "penalties");
  TORCH_CHECK(logits.scalar_type() == at::kFloat && penalties.scalar_type() == at::kFloat && penalties.sizes() == logits.sizes(),
              "logits are ", logits.scalar_type(), logits.sizes(), " and penalties ", penalties.scalar_type(), penalties.sizes(),
              "; use float32, a penalty for each logit");
  auto* numbers = logits.data_ptr<float>();
  const auto* factors = penalties.data_ptr<float>();
  const int64_t count = logits.numel();
  run_tasks(divide_up(count, kNumbersPerTask), [&](int64_t task, int) {
    const int64_t begin = task * kNumbersPerTask;
    penalize(numbers + begin, factors + begin, std::min(kNumbersPerTask, count - begin));
  });
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("mask_tokens(Tensor(a!) logits, Tensor allowed) -> ()");
  library.def("penalize_repetition(Tensor(a!) logits, Tensor penalties) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("mask_tokens", sgl_batch::mask_tokens);
  library.impl("penalize_repetition", sgl_batch::penalize_repetition);
}
