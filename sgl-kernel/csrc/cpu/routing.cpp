#include "routing.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "clones.h"
#include "gemm.h"

namespace sgl_batch {
namespace {

constexpr int kMostChoices = 255;
constexpr int kMostOpen = 64;  // sums that wait for others: one for each halving of the ids

// How many halvings of [0, experts) leave a and b together; a <= b.
int shared_depth(int64_t a, int64_t b, int64_t experts) {
  int64_t low = 0, high = experts;
  int depth = 0;
  while (high - low > 1) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (a < middle && b >= middle) return depth;
    (b < middle ? high : low) = middle;
    ++depth;
  }
  return depth;
}

}  // namespace

Routing route(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k, int64_t experts) {
  if (top_k > kMostChoices) throw std::invalid_argument("a token has " + std::to_string(top_k) + " choices; at most 255");
  Routing routing;
  routing.offsets.assign(experts + 1, 0);
  routing.choices.assign(tokens, 0);
  routing.weights.assign(tokens * top_k, 0.0f);
  routing.merges.assign(tokens * top_k, 0);
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    if (ids[i] >= experts)
      throw std::invalid_argument("expert id " + std::to_string(ids[i]) + " with " + std::to_string(experts) + " experts");
    if (ids[i] >= 0) ++routing.offsets[ids[i] + 1];
  }
  for (int64_t expert = 0; expert < experts; ++expert) routing.offsets[expert + 1] += routing.offsets[expert];
  routing.rows.resize(routing.offsets[experts]);
  std::vector<int64_t> next(routing.offsets.begin(), routing.offsets.end() - 1);
  std::vector<int32_t> order(top_k);
  std::vector<int> open;  // depths at which the sums on the stack part from the next one
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t* own = ids + token * top_k;
    int count = 0;
    for (int32_t k = 0; k < top_k; ++k)
      if (own[k] >= 0) order[count++] = k;
    // Equal ids stay in their order.
    std::sort(order.begin(), order.begin() + count,
              [own](int32_t a, int32_t b) { return own[a] < own[b] || (own[a] == own[b] && a < b); });
    routing.choices[token] = count;
    open.clear();
    for (int i = 0; i < count; ++i) {
      const int64_t place = token * top_k + i;
      routing.rows[next[own[order[i]]]++] = {token, place};
      routing.weights[place] = weights[token * top_k + order[i]];
      const int depth = i + 1 < count ? shared_depth(own[order[i]], own[order[i + 1]], experts) : -1;
      while (!open.empty() && open.back() >= depth) {
        ++routing.merges[place];
        open.pop_back();
      }
      open.push_back(depth);
    }
  }
  return routing;
}

std::pair<int64_t, int64_t> Routing::rows_of(int64_t expert, int64_t begin, int64_t end) const {
  const auto first = rows.begin() + offsets[expert], last = rows.begin() + offsets[expert + 1];
  const auto before = [](const RoutedRow& row, int64_t token) { return row.token < token; };
  const auto from = std::lower_bound(first, last, begin, before);
  return {from - rows.begin(), std::lower_bound(from, last, end, before) - rows.begin()};
}

namespace {

typedef float Wide __attribute__((vector_size(64)));
typedef float WideAnywhere __attribute__((vector_size(64), aligned(4), may_alias));

// kVectors times 16 columns of a token's sum. What is added last stays in registers.
template <int kVectors>
inline __attribute__((always_inline)) void sum_columns(const float* rows, int64_t stride, const int32_t* at,
                                                       const float* weights, const uint8_t* merges, int choices,
                                                       float* out) {
  Wide open[kMostOpen][kVectors], sum[kVectors] = {};
  int top = 0;
  for (int i = 0; i < choices; ++i) {
    const auto* row = reinterpret_cast<const WideAnywhere*>(rows + at[i] * stride);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[v] = weights[i] * row[v];
    for (int merge = 0; merge < merges[i]; ++merge) {
      --top;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[v] = open[top][v] + sum[v];
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) open[top][v] = sum[v];
    ++top;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) reinterpret_cast<WideAnywhere*>(out)[v] = sum[v];
}

}  // namespace

SGL_BATCH_CLONES void weighted_sum(const float* rows, int64_t stride, const int32_t* at, const float* weights,
                                   const uint8_t* merges, int choices, int64_t count, float* out) {
  static_assert(kPanel == 32);
  int64_t column = 0;
  for (; column + 2 * kPanel <= count; column += 2 * kPanel)
    sum_columns<4>(rows + column, stride, at, weights, merges, choices, out + column);
  for (; column < count; column += kPanel)
    sum_columns<2>(rows + column, stride, at, weights, merges, choices, out + column);
}

}  // namespace sgl_batch
