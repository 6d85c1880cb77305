#include "routing.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace sgl_batch {
namespace {

constexpr int kMostChoices = 255;

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
  routing.chosen.assign(tokens, 0);
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    if (ids[i] >= experts)
      throw std::invalid_argument("expert id " + std::to_string(ids[i]) + " with " + std::to_string(experts) + " experts");
    if (ids[i] >= 0) ++routing.offsets[ids[i] + 1];
  }
  for (int64_t expert = 0; expert < experts; ++expert) routing.offsets[expert + 1] += routing.offsets[expert];
  routing.rows.resize(routing.offsets[experts]);
  std::vector<int64_t> next(routing.offsets.begin(), routing.offsets.end() - 1);
  std::vector<int32_t> order(top_k);
  std::vector<int> open;  // depths at which the token's open sums part from the next row
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t* own = ids + token * top_k;
    int count = 0;
    for (int32_t k = 0; k < top_k; ++k)
      if (own[k] >= 0) order[count++] = k;
    // Equal ids stay in their order.
    std::sort(order.begin(), order.begin() + count,
              [own](int32_t a, int32_t b) { return own[a] < own[b] || (own[a] == own[b] && a < b); });
    routing.chosen[token] = static_cast<uint8_t>(count);
    open.clear();
    for (int i = 0; i < count; ++i) {
      const int32_t expert = own[order[i]];
      const int depth = i + 1 < count ? shared_depth(expert, own[order[i + 1]], experts) : -1;
      const size_t before = open.size();
      while (!open.empty() && open.back() >= depth) open.pop_back();
      routing.rows[next[expert]++] = {static_cast<int32_t>(token), weights[token * top_k + order[i]], static_cast<uint8_t>(before),
                                      static_cast<uint8_t>(before - open.size())};
      open.push_back(depth);
      routing.most_open = std::max(routing.most_open, static_cast<int>(open.size()));
    }
  }
  return routing;
}

int64_t Routing::first_row(int64_t expert, int64_t token) const {
  const auto first = rows.begin() + offsets[expert], last = rows.begin() + offsets[expert + 1];
  return std::lower_bound(first, last, token, [](const RoutedRow& row, int64_t wanted) { return row.token < wanted; }) - rows.begin();
}

}  // namespace sgl_batch
