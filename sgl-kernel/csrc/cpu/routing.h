// Owns the order of routed rows: by expert for the products, by token and expert id for the sums.
#pragma once

#include <cstdint>
#include <vector>

namespace sgl_batch {

// A token's row for one of its experts. Its weighted product is added to the token's youngest `merges` open sums, one
// after the other, and stays as an open sum itself; see TokenSums.
struct RoutedRow {
  int32_t token;
  float weight;
  uint8_t open;    // sums of the token that wait for others when this row comes
  uint8_t merges;  // at most `open`
};

struct Routing {
  std::vector<RoutedRow> rows;   // by expert, then by token
  std::vector<int64_t> offsets;  // [experts + 1] into rows
  std::vector<uint8_t> chosen;   // [tokens] choices that count
  int most_open = 0;             // sums of a token that are open at a time

  // The first row of an expert whose token is not below the given one; the end of its rows where there is none.
  int64_t first_row(int64_t expert, int64_t token) const;
};

// Throws std::invalid_argument when an id is not below `experts`.
Routing route(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k, int64_t experts);

}  // namespace sgl_batch
