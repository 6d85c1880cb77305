#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "packing.h"
#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

constexpr int64_t kRowsPerBlock = 96;  // rows (tokens x query heads of one KV head) that share a pass over the pages

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Tokens [begin, end) of a piece, for one KV head.
struct Block {
  int64_t piece, head, begin, end;
};

class Attention {
 public:
  explicit Attention(const AttentionCall& call)
      : c_(call),
        isa_(isa()),
        pairs_(isa_.bf16_pairs && call.dtype == DType::kBf16),
        tile_(call.dtype == DType::kBf16 ? isa_.tile_bf16 : isa_.tile_f32),
        group_(call.q_heads / call.kv_heads),
        tokens_per_block_(std::max<int64_t>(1, kRowsPerBlock / group_)),
        padded_page_(round_up(call.page, kPanel)),
        padded_dim_(round_up(call.dim, kPanel)) {
    for (int64_t piece = 0; piece < c_.pieces; ++piece)
      for (int64_t head = 0; head < c_.kv_heads; ++head)
        for (int64_t token = 0, count = c_.starts[piece + 1] - c_.starts[piece]; token < count;
             token += tokens_per_block_)
          blocks_.push_back({piece, head, token, std::min(count, token + tokens_per_block_)});
    // Long ones first, so that no thread begins one at the end.
    std::stable_sort(blocks_.begin(), blocks_.end(), [this](const Block& a, const Block& b) { return work(a) > work(b); });
  }

  void run() {
    Carver one;
    const int64_t rows = round_up(tokens_per_block_ * group_, isa_.max_rows);
    queries_at_ = one.take(static_cast<size_t>(rows * c_.dim) * 4);
    sums_at_ = one.take(static_cast<size_t>(rows * padded_dim_) * 4);
    state_at_ = one.take(static_cast<size_t>(rows) * 2 * 4);
    scores_at_ = one.take(static_cast<size_t>(kMaxRows * padded_page_) * 4);
    weights_at_ = one.take(static_cast<size_t>(kMaxRows * c_.page) * 4);
    result_at_ = one.take(static_cast<size_t>(kMaxRows) * kPanel * 4);
    spare_at_ = one.take(static_cast<size_t>(kPanel * std::max(c_.dim, c_.page)) * 4);
    const size_t bytes = static_cast<size_t>(round_up(static_cast<int64_t>(one.total()), 4096));
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(bytes * num_threads()));
    run_tasks(static_cast<int64_t>(blocks_.size()),
              [&](int64_t index, int thread) { attend(blocks_[index], base + bytes * thread); });
  }

 private:
  int64_t work(const Block& block) const { return (block.end - block.begin) * seen_by(block, block.end - 1); }

  // How many tokens the given token of a block's piece sees.
  int64_t seen_by(const Block& block, int64_t token) const {
    return c_.lengths[block.piece] - (c_.starts[block.piece + 1] - c_.starts[block.piece]) + token + 1;
  }

  size_t element() const { return size_of(c_.dtype); }
  int rows_of_tile(int64_t row, int64_t rows) const { return static_cast<int>(std::min<int64_t>(isa_.max_rows, rows - row)); }

  const char* head_of_page(const void* pages, const Block& block, int64_t page) const {
    const int64_t number = c_.tables[c_.table_starts[block.piece] + page];
    return static_cast<const char*>(pages) +
           static_cast<size_t>((number * c_.kv_heads + block.head) * c_.page * c_.dim) * element();
  }

  // Row r of a block is query head r % group_ of its token r / group_.
  size_t row_offset(const Block& block, int64_t row, int64_t stride) const {
    const int64_t token = c_.starts[block.piece] + block.begin + row / group_;
    return static_cast<size_t>(token * stride + (block.head * group_ + row % group_) * c_.dim) * element();
  }

  void attend(const Block& block, char* scratch) const {
    const int64_t rows = (block.end - block.begin) * group_;
    auto* sums = reinterpret_cast<float*>(scratch + sums_at_);
    auto* state = reinterpret_cast<float*>(scratch + state_at_);
    std::fill(sums, sums + rows * padded_dim_, 0.0f);
    for (int64_t row = 0; row < rows; ++row) {
      state[2 * row] = -std::numeric_limits<float>::infinity();
      state[2 * row + 1] = 0.0f;
    }
    pack_queries(block, rows, scratch + queries_at_);
    const int64_t pages = divide_up(seen_by(block, block.end - 1), c_.page);
    for (int64_t page = 0; page < pages; ++page)
      for (int64_t row = 0; row < rows; row += isa_.max_rows) {
        const int m = rows_of_tile(row, rows);
        if (seen_by(block, block.begin + (row + m - 1) / group_) > page * c_.page) attend_tile(block, page, row, m, scratch);
      }
    for (int64_t row = 0; row < rows; ++row) {
      float* sum = sums + row * padded_dim_;
      scale_row(sum, sum, 1.0f / state[2 * row + 1], c_.dim);
      write_row(static_cast<char*>(c_.out) + row_offset(block, row, c_.q_heads * c_.dim), c_.dtype, sum, c_.dim);
    }
  }

  void pack_queries(const Block& block, int64_t rows, char* tiles) const {
    for (int64_t row = 0; row < rows; row += isa_.max_rows) {
      const int m = rows_of_tile(row, rows);
      const void* from[kMaxRows];
      for (int i = 0; i < m; ++i) from[i] = static_cast<const char*>(c_.q) + row_offset(block, row + i, c_.q_stride);
      pack_tile(from, m, c_.dim, c_.dtype, pairs_, tiles + row * c_.dim * 4);
    }
  }

  // One tile of rows against one page: scores, weights, and what they add to the sums.
  void attend_tile(const Block& block, int64_t page, int64_t row, int m, char* scratch) const {
    auto* scores = reinterpret_cast<float*>(scratch + scores_at_);
    auto* result = reinterpret_cast<float*>(scratch + result_at_);
    auto* state = reinterpret_cast<float*>(scratch + state_at_) + 2 * row;
    auto* sums = reinterpret_cast<float*>(scratch + sums_at_) + row * padded_dim_;
    const char* keys = head_of_page(c_.k_pages, block, page);
    const char* values = head_of_page(c_.v_pages, block, page);
    const int64_t most = std::min(c_.page, seen_by(block, block.begin + (row + m - 1) / group_) - page * c_.page);
    for (int64_t panel = 0; panel * kPanel < most; ++panel) {
      tile_(scratch + queries_at_ + row * c_.dim * 4,
            full_panel(keys, c_.page, c_.dim, panel, c_.dtype, scratch + spare_at_), c_.dim, m, result);
      for (int i = 0; i < m; ++i)
        std::copy(result + i * kPanel, result + (i + 1) * kPanel, scores + i * padded_page_ + panel * kPanel);
    }
    for (int i = 0; i < m; ++i) {
      const int64_t seen = seen_by(block, block.begin + (row + i) / group_) - page * c_.page;
      const float kept = isa_.softmax_step(scores + i * padded_page_, std::clamp<int64_t>(seen, 0, c_.page), padded_page_,
                                           c_.scaling, state + 2 * i);
      if (kept != 1.0f) scale_row(sums + i * padded_dim_, sums + i * padded_dim_, kept, c_.dim);
    }
    const void* from[kMaxRows];
    for (int i = 0; i < m; ++i) from[i] = scores + i * padded_page_;
    pack_tile(from, m, c_.page, DType::kF32, pairs_, scratch + weights_at_);
    for (int64_t panel = 0; panel * kPanel < c_.dim; ++panel) {
      tile_(scratch + weights_at_, full_panel(values, c_.dim, c_.page, panel, c_.dtype, scratch + spare_at_), c_.page, m,
            result);
      for (int i = 0; i < m; ++i) add_row(sums + i * padded_dim_ + panel * kPanel, result + i * kPanel, kPanel);
    }
  }

  const AttentionCall& c_;
  const Isa& isa_;
  const bool pairs_;
  const TileFn tile_;
  const int64_t group_, tokens_per_block_, padded_page_, padded_dim_;
  std::vector<Block> blocks_;
  size_t queries_at_ = 0, sums_at_ = 0, state_at_ = 0, scores_at_ = 0, weights_at_ = 0, result_at_ = 0, spare_at_ = 0;
};

}  // namespace

void run_attention(const AttentionCall& call) { Attention(call).run(); }

}  // namespace sgl_batch
