// Owns the order of routed rows: by expert for the products, by token and expert id for the sums.
#pragma once

#include <cstdint>
#include <vector>

namespace sgl_batch {

struct RoutedRow {
  int64_t token;
  int64_t place;  // where the row's result lies for the sum: token * top_k + its rank among the token's expert ids
  float weight;
};

struct Routing {
  std::vector<RoutedRow> rows;       // by expert, then by token
  std::vector<int64_t> offsets;      // [experts + 1] into rows
  std::vector<int32_t> choices;      // [tokens] choices that count
  std::vector<uint8_t> merges;       // [tokens * top_k] sums to form after the row at this place, see tree_sum
};

// Throws std::invalid_argument when an id is not below `experts`.
Routing route(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k, int64_t experts);

// Adds up a token's rows (row i begins at rows + i * stride) into the first, in the order that `merges` holds.
void tree_sum(float* rows, int64_t stride, int64_t count, int choices, const uint8_t* merges);

}  // namespace sgl_batch
