// Owns the order in which ranks' partial sums of a token are added up: that of a binary tree over ranks, the upper part of the
// tree over expert ids in which each rank adds up its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "rows.h"

namespace sgl_batch {

// The sum over ranks [first, last): row_of(rank) gives a rank's row, or null where it has none, which counts as nothing. The
// result is one of those, or `space` (a row for each rank), or null. The middle rank of an odd number belongs to the first half.
template <typename RowOf>
const float* sum_of_ranks(const RowOf& row_of, int first, int last, int64_t hidden, float* space) {
  if (last - first == 1) return row_of(first);
  const int middle = first + (last - first + 1) / 2;
  const float* left = sum_of_ranks(row_of, first, middle, hidden, space);
  const float* right = sum_of_ranks(row_of, middle, last, hidden, left == nullptr ? space : space + hidden);
  if (left == nullptr) return right;
  if (right == nullptr) return left;
  if (left != space) std::memcpy(space, left, static_cast<size_t>(hidden) * 4);
  add_row(space, right, hidden);
  return space;
}

// The same over all ranks, written to `to`; 0 where no rank has a row.
template <typename RowOf>
void write_sum_of_ranks(const RowOf& row_of, int ranks, int64_t hidden, float* space, float* to) {
  const float* sum = sum_of_ranks(row_of, 0, ranks, hidden, space);
  if (sum == nullptr)
    std::memset(to, 0, static_cast<size_t>(hidden) * 4);
  else
    std::memcpy(to, sum, static_cast<size_t>(hidden) * 4);
}

}  // namespace sgl_batch
