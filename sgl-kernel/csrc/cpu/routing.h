// Owns the order of routed rows: by expert for the products, by token and expert id for the sums.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace sgl_batch {

struct RoutedRow {
  int64_t token;
  int64_t place;  // token * top_k + the rank of the row's expert among the token's expert ids
};

struct Routing {
  std::vector<RoutedRow> rows;    // by expert, then by token
  std::vector<int64_t> offsets;   // [experts + 1] into rows
  std::vector<int32_t> choices;   // [tokens] choices that count
  std::vector<float> weights;     // [tokens * top_k] by place
  std::vector<uint8_t> merges;    // [tokens * top_k] by place: sums to form after this row, see weighted_sum

  // The rows of an expert whose tokens lie in [begin, end), as a range of `rows`.
  std::pair<int64_t, int64_t> rows_of(int64_t expert, int64_t begin, int64_t end) const;
};

// Throws std::invalid_argument when an id is not below `experts`.
Routing route(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k, int64_t experts);

// out[count] = the sum of weights[i] * row i over a token's `choices`, in the order that `merges` holds; row i begins at
// rows + at[i] * stride. `count` is a multiple of kPanel. Products and sums are rounded one by one.
void weighted_sum(const float* rows, int64_t stride, const int32_t* at, const float* weights, const uint8_t* merges,
                  int choices, int64_t count, float* out);

}  // namespace sgl_batch
