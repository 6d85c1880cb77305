#include "token_sums.h"

#include <algorithm>
#include <cstring>

#include "clones.h"
#include "rows.h"

namespace sgl_batch {
namespace {

typedef float Wide __attribute__((vector_size(64)));
typedef float WideAnywhere __attribute__((vector_size(64), aligned(4), may_alias));

constexpr int64_t kNear = 256 << 10;  // bytes of open sums that stay in the second cache

// kVectors times 16 columns of one row. `open` is the token's first open sum, `level` the floats from one to the next.
template <int kVectors>
inline __attribute__((always_inline)) void add_columns(const RoutedRow& row, const float* product, float* open, int64_t level) {
  Wide sum[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) sum[v] = row.weight * reinterpret_cast<const WideAnywhere*>(product)[v];
  open += row.open * level;
  for (int merge = 0; merge < row.merges; ++merge) {
    open -= level;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[v] = reinterpret_cast<const WideAnywhere*>(open)[v] + sum[v];
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) reinterpret_cast<WideAnywhere*>(open)[v] = sum[v];
}

SGL_BATCH_CLONES void add_rows(const RoutedRow* rows, int count, int64_t begin, const float* products, int64_t columns,
                               float* open, int64_t level) {
  static_assert(kPanel == 32);
  const int lead = level * 4 > kNear ? 4 : 0;  // rows: what they are added to has left the second cache
  const auto bring = [&](const RoutedRow& row) __attribute__((always_inline)) {
    const float* own = open + (row.token - begin) * columns + row.open * level;
    for (int64_t column = 0; column < columns; column += kLineBytes / 4) {
      __builtin_prefetch(own + column, 1, 3);
      if (row.merges > 0) __builtin_prefetch(own - level + column, 0, 3);
    }
  };
  for (int i = 0; i < std::min(lead, count); ++i) bring(rows[i]);
  for (int i = 0; i < count; ++i, products += columns) {
    if (lead > 0 && i + lead < count) bring(rows[i + lead]);
    float* own = open + (rows[i].token - begin) * columns;
    int64_t column = 0;
    for (; column + 2 * kPanel <= columns; column += 2 * kPanel) add_columns<4>(rows[i], products + column, own + column, level);
    for (; column < columns; column += kPanel) add_columns<2>(rows[i], products + column, own + column, level);
  }
}

}  // namespace

void TokenSums::add(int64_t first, int count, const float* products) {
  add_rows(routing_.rows.data() + first, count, begin_, products, columns_, open_, (end_ - begin_) * columns_);
}

void TokenSums::write(void* to, int64_t stride, DType dtype, int64_t width) const {
  auto* row = static_cast<char*>(to);
  for (int64_t token = begin_; token < end_; ++token, row += stride)
    if (routing_.chosen[token] == 0)
      std::memset(row, 0, static_cast<size_t>(width) * size_of(dtype));
    else
      write_row(row, dtype, open_ + (token - begin_) * columns_, width);
}

}  // namespace sgl_batch
