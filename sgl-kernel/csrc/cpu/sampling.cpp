// Owns drawing a token from each row of probabilities, which top_k, top_p and min_p cut, without a sort, or from
// each row of logits, whose powers of e stay in the cache.
//
// The result is that of sorting tokens by descending probability, equal ones by token; keeping the first top_k, of these a token
// if the probabilities before it sum to at most top_p, and of these the ones of at least min_p times the largest; and drawing
// by inverse transform in that order. A row without filters is drawn by inverse transform in the order of its tokens.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "clones.h"
#include "power_of_e.h"
#include "tasks.h"
#include "tensor_checks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

constexpr int64_t kBlock = 128;          // numbers that are passed over together where none of them can be kept
constexpr int32_t kNoTopK = 1 << 30;     // from here on top_k is no limit, as in SGLang
constexpr uint32_t kEndOfKeys = 1u << 30;  // positive floats below 2 have the order of their bits, which are below this

// A key is cut into digits, the highest first. Tokens are ranked by as many histograms as that.
struct Digit {
  int shift, values;
};
constexpr std::array<Digit, 3> kDigits{{{19, 2048}, {8, 2048}, {0, 256}}};
constexpr int kMostValues = 2048;

struct Histogram {
  double sums[kMostValues];
  int32_t counts[kMostValues];
};

struct Block {
  double sum;
  float largest;  // not of NaN
};

SGL_BATCH_CLONES Block survey(const float* numbers, int64_t count) {
  double sum = 0;
  float largest = 0;
#pragma omp simd reduction(+ : sum) reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(numbers[i]);
    largest = numbers[i] > largest ? numbers[i] : largest;
  }
  return {sum, largest};
}

SGL_BATCH_CLONES float largest_of(const float* numbers, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
  return largest;
}

// e to the power of each number's distance to the largest one, times a factor.
SGL_BATCH_CLONES void powers(const float* numbers, float* to, int64_t count, float largest, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = exp_of((numbers[i] - largest) * factor);
}

struct Candidates {
  uint32_t* keys;
  int32_t* tokens;  // ascending
  int64_t count;

  // Appends those of at least `least`, a key above 0. There is room for all numbers of the row.
  void append(const float* row, int64_t begin, int64_t end, uint32_t least) {
    for (int64_t token = begin; token < end; ++token) {
      const auto key = std::bit_cast<uint32_t>(row[token]);
      keys[count] = key;
      tokens[count] = static_cast<int32_t>(token);
      count += key - least < kEndOfKeys - least;  // neither negative nor NaN
    }
  }
};

// A value with what is above it.
struct Place {
  uint32_t key;
  double before;  // the sum of all larger ones
  int64_t rank;   // how many they are
  int64_t ties;   // how many tokens of this value are within the limits

  double value() const { return static_cast<double>(std::bit_cast<float>(key)); }
};

// The candidates in descending order, as far as somebody asks for it.
class Ranking {
 public:
  Ranking(const Candidates& candidates, Histogram& first, Histogram& others)
      : candidates_(candidates), first_(first), others_(others) {
    count(first_, kDigits[0], 0);
  }

  // Where the last token lies that fewer than `tokens` others, of at most `sum` together, are before. The first one always is.
  Place last_within(double sum, int64_t tokens) const {
    Place place{0, 0, 0, 0};
    for (const Digit& digit : kDigits) {
      Histogram& histogram = digit.shift == kDigits[0].shift ? first_ : others_;
      if (&histogram == &others_) count(others_, digit, place.key);
      const int32_t* counts = histogram.counts;
      const auto lowest = static_cast<int>(std::find_if(counts, counts + digit.values, std::identity{}) - counts);
      int found = digit.values - 1;
      for (; found > lowest; --found) {
        if (counts[found] == 0) continue;
        if (place.rank + counts[found] >= tokens || place.before + histogram.sums[found] > sum) break;
        place.rank += counts[found];
        place.before += histogram.sums[found];
      }
      place.key |= static_cast<uint32_t>(found) << digit.shift;
      place.ties = counts[found];
    }
    const double room = std::floor((sum - place.before) / place.value()) + 1;
    const int64_t most = std::min(place.ties, tokens - place.rank);
    place.ties = std::max<int64_t>(1, room < static_cast<double>(most) ? static_cast<int64_t>(room) : most);
    return place;
  }

 private:
  // Of candidates whose digits before this one are those of `prefix`.
  void count(Histogram& to, const Digit& digit, uint32_t prefix) const {
    std::fill_n(to.sums, digit.values, 0.0);
    std::fill_n(to.counts, digit.values, 0);
    const auto values = static_cast<uint32_t>(digit.values);
    for (int64_t i = 0; i < candidates_.count; ++i) {
      const uint32_t key = candidates_.keys[i], at = (key - prefix) >> digit.shift;
      if (at >= values) continue;
      to.sums[at] += static_cast<double>(std::bit_cast<float>(key));
      ++to.counts[at];
    }
  }

  const Candidates& candidates_;
  Histogram& first_;
  Histogram& others_;
};

struct Limits {
  int32_t top_k;
  float top_p, min_p;

  bool any() const { return top_k < kNoTopK || top_p != 1.0f || min_p > 0; }
};

// What a thread needs for a row of `count` numbers.
class Scratch {
 public:
  Scratch(int64_t count, bool of_logits) {
    const auto numbers = static_cast<size_t>(count);
    Carver carver;
    const size_t blocks = carver.take(sizeof(Block) * num_blocks(count)), largest = carver.take(sizeof(float) * num_blocks(count));
    const size_t keys = carver.take(sizeof(uint32_t) * numbers), tokens = carver.take(sizeof(int32_t) * numbers);
    const size_t powers = carver.take(of_logits ? sizeof(float) * numbers : 0);
    const size_t first = carver.take(sizeof(Histogram)), others = carver.take(sizeof(Histogram));
    static thread_local Workspace workspace;
    auto* base = static_cast<char*>(workspace.at_least(carver.total()));
    carver.guard(base);
    this->blocks = reinterpret_cast<Block*>(base + blocks);
    this->largest = reinterpret_cast<float*>(base + largest);
    candidates = {reinterpret_cast<uint32_t*>(base + keys), reinterpret_cast<int32_t*>(base + tokens), 0};
    this->powers = reinterpret_cast<float*>(base + powers);
    this->first = reinterpret_cast<Histogram*>(base + first);
    this->others = reinterpret_cast<Histogram*>(base + others);
  }
  static size_t num_blocks(int64_t count) { return static_cast<size_t>(divide_up(count, kBlock)); }

  Block* blocks;
  float* largest;  // of each block
  float* powers;
  Candidates candidates;
  Histogram *first, *others;
};

class Row {
 public:
  Row(const float* probs, int64_t count, Scratch& scratch) : Row(count, scratch) {
    numbers_ = probs;
    for (int64_t b = 0; b < num_blocks_; ++b) add(b);
    whole_ = 1;
  }

  // The softmax of logits over a temperature is not divided by its sum: limits are multiplied by it.
  Row(const float* logits, float temperature, int64_t count, Scratch& scratch) : Row(count, scratch) {
    numbers_ = scratch.powers;
    const float largest = largest_of(logits, count);
    for (int64_t b = 0; b < num_blocks_; ++b) {
      powers(logits + b * kBlock, scratch.powers + b * kBlock, end_of(b) - b * kBlock, largest, 1.0f / temperature);
      add(b);
    }
    whole_ = sum_;
  }

  int64_t draw(const Limits& limits, double uniform) {
    if (!std::isfinite(sum_)) return 0;
    return limits.any() ? draw_ranked(limits, uniform) : draw_in_order(uniform);
  }

 private:
  Row(int64_t count, Scratch& scratch) : count_(count), num_blocks_(divide_up(count, kBlock)), scratch_(scratch) {}

  void add(int64_t b) {
    const Block& block = scratch_.blocks[b] = survey(numbers_ + b * kBlock, end_of(b) - b * kBlock);
    sum_ += block.sum;
    largest_ = std::max(largest_, block.largest);
  }

  int64_t end_of(int64_t block) const { return std::min(count_, (block + 1) * kBlock); }

  int64_t draw_in_order(double uniform) const {
    const double threshold = uniform * sum_;
    double before = 0;
    int64_t block = 0, drawn = 0;
    for (; block + 1 < num_blocks_ && before + scratch_.blocks[block].sum <= threshold; ++block)
      before += scratch_.blocks[block].sum;
    for (int64_t token = block * kBlock; token < end_of(block); ++token) {
      if (!(numbers_[token] > 0)) continue;
      drawn = token;  // the last one, too, where rounding leaves the threshold behind it
      before += static_cast<double>(numbers_[token]);
      if (before > threshold) break;
    }
    return drawn;
  }

  int64_t draw_ranked(const Limits& limits, double uniform) {
    const uint32_t least = least_key(limits);
    Candidates& candidates = scratch_.candidates;
    candidates.count = 0;
    for (int64_t b = 0; b < num_blocks_; ++b)
      if (std::bit_cast<uint32_t>(scratch_.blocks[b].largest) >= least) candidates.append(numbers_, b * kBlock, end_of(b), least);
    if (candidates.count == 0) return 0;  // no number is a probability
    const Ranking ranking(candidates, *scratch_.first, *scratch_.others);
    const double most = static_cast<double>(limits.top_p) * whole_;
    const Place end = ranking.last_within(most, std::min<int64_t>(limits.top_k, candidates.count));
    const double kept = end.before + static_cast<double>(end.ties) * end.value();
    Place drawn = ranking.last_within(uniform * kept, end.rank + end.ties);
    int64_t at = 0;
    for (; candidates.keys[at] != drawn.key || --drawn.ties > 0; ++at) {
    }
    return candidates.tokens[at];
  }

  // No token of a smaller key is kept.
  uint32_t least_key(const Limits& limits) const {
    float least = largest_ * limits.min_p;
    // Those that are smaller than an equal share of what top_p leaves over do not make it up together.
    const double over = sum_ - static_cast<double>(limits.top_p) * whole_, rounding = 1e-9 * whole_;
    if (over > rounding) least = std::max(least, static_cast<float>((over - rounding) / static_cast<double>(count_) * 0.999));
    if (limits.top_k < num_blocks_) {  // as many blocks have a number as large as that
      float* const all = scratch_.largest;
      for (int64_t b = 0; b < num_blocks_; ++b) all[b] = scratch_.blocks[b].largest;
      float* const last = all + std::max(limits.top_k, 1) - 1;
      std::nth_element(all, last, all + num_blocks_, std::greater<>());
      least = std::max(least, *last);
    }
    return std::clamp<uint32_t>(std::bit_cast<uint32_t>(least), 1, kEndOfKeys);
  }

  const float* numbers_ = nullptr;
  int64_t count_, num_blocks_;
  Scratch& scratch_;
  double sum_ = 0, whole_ = 0;  // whole_: what a probability of 1 is
  float largest_ = 0;
};

template <typename Number>
const Number* limits_in(const at::Tensor& given, at::ScalarType type, int64_t rows, const char* name) {
  TORCH_CHECK(given.scalar_type() == type && given.is_contiguous() && given.numel() == rows, name, " is ", given.scalar_type(),
              given.sizes(), "; use contiguous ", type, ", one for each of ", rows, " rows");
  return given.data_ptr<Number>();
}

at::Tensor sample(const at::Tensor& probs, const at::Tensor& top_ks, const at::Tensor& top_ps, const at::Tensor& min_ps,
                  const at::Tensor& uniforms, const std::optional<at::Tensor>& temperatures) {
  TORCH_CHECK(probs.dim() == 2 && probs.size(1) > 0 && probs.size(1) < kNoTopK && probs.stride(1) == 1, "probs are ",
              probs.sizes(), " with strides ", probs.strides(), "; rows are contiguous and have from 1 to 2**30 - 1 numbers");
  TORCH_CHECK(probs.scalar_type() == at::kFloat, "probs are ", probs.scalar_type(), "; use float32");
  const int64_t rows = probs.size(0), count = probs.size(1), stride = probs.stride(0);
  const auto* top_k = limits_in<int32_t>(top_ks, at::kInt, rows, "top_ks");
  const auto* top_p = limits_in<float>(top_ps, at::kFloat, rows, "top_ps");
  const auto* min_p = limits_in<float>(min_ps, at::kFloat, rows, "min_ps");
  const auto* uniform = limits_in<double>(uniforms, at::kDouble, rows, "uniforms");
  const auto* temperature = temperatures ? limits_in<float>(*temperatures, at::kFloat, rows, "temperatures") : nullptr;
  auto out = at::empty({rows}, probs.options().dtype(at::kLong));
  auto* to = out.data_ptr<int64_t>();
  const auto* from = probs.data_ptr<float>();
  run_tasks(rows, [&](int64_t row, int) {
    Scratch scratch(count, temperature != nullptr);
    const float* const numbers = from + row * stride;
    Row one = temperature == nullptr ? Row(numbers, count, scratch) : Row(numbers, temperature[row], count, scratch);
    to[row] = one.draw({top_k[row], top_p[row], min_p[row]}, uniform[row]);
  });
  return out;
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("sample(Tensor probs, Tensor top_ks, Tensor top_ps, Tensor min_ps, Tensor uniforms, "
              "Tensor? temperatures=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) { library.impl("sample", sgl_batch::sample); }
