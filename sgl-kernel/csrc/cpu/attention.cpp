#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "packing.h"
#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

constexpr int64_t kRowsPerBlock = 96;  // rows (tokens x query heads of one KV head) that share a pass over the pages
constexpr int64_t kChunk = 128;        // tokens of one step of the softmax

// Tokens [begin, end) of a piece, for KV heads [head, last_head).
struct Block {
  int64_t piece, head, last_head, begin, end;
};

// One head's rows of a block.
struct Rows {
  const char* queries;
  float* state;
  float* sums;
};

// One head's part of a page.
struct Pages {
  PackedWeight keys, values;
};

// What is read after a chunk: the one of this head that begins at token `first`.
struct Next {
  const Block* block;
  int64_t head, first;
};

class Attention {
 public:
  explicit Attention(const AttentionCall& call)
      : c_(call),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(call.dtype)),
        tile_(isa_.chained_tile(call.dtype)),
        group_(call.q_heads / call.kv_heads),
        tokens_per_block_(std::max<int64_t>(1, kRowsPerBlock / group_)),
        chunk_(call.page % kChunk == 0 || kChunk % call.page == 0 ? kChunk : call.page),
        part_(std::min(chunk_, call.page)),
        // Products of a page of fewer tokens than a panel has go past its part of a row.
        score_stride_(round_up(chunk_, kPanel) + (part_ < kPanel ? kPanel : 0)),
        padded_dim_(round_up(call.dim, kPanel)) {
    int64_t count = 0;
    for (int64_t piece = 0; piece < c_.pieces; ++piece)
      count += divide_up(c_.starts[piece + 1] - c_.starts[piece], tokens_per_block_);
    const bool enough = count >= kTasksPerThread * num_threads();
    for (int64_t piece = 0; piece < c_.pieces; ++piece) {
      // The heads of a page lie one after the other: where there are blocks enough, one of few rows takes them all.
      const int64_t tokens = c_.starts[piece + 1] - c_.starts[piece];
      const int64_t heads = enough && tokens * c_.q_heads <= tokens_per_block_ * group_ ? c_.kv_heads : 1;
      for (int64_t head = 0; head < c_.kv_heads; head += heads)
        for (int64_t token = 0; token < tokens; token += tokens_per_block_)
          blocks_.push_back({piece, head, head + heads, token, std::min(tokens, token + tokens_per_block_)});
    }
    // Long ones first, so that no thread begins one at the end.
    std::stable_sort(blocks_.begin(), blocks_.end(), [this](const Block& a, const Block& b) { return work(a) > work(b); });
  }

  void run() {
    Carver one;
    const int64_t rows = tokens_per_block_ * group_;
    queries_at_ = one.take(static_cast<size_t>(rows * c_.dim) * 4);
    sums_at_ = one.take(static_cast<size_t>(rows * padded_dim_) * 4);
    state_at_ = one.take(static_cast<size_t>(rows) * 2 * 4);
    scores_at_ = one.take(static_cast<size_t>(tile_.max_rows * score_stride_) * 4);
    weights_at_ = one.take(static_cast<size_t>(tile_.max_rows * score_stride_) * 4);
    spare_at_ = one.take(static_cast<size_t>(kPanel * std::max(c_.dim, c_.page)) * 4);
    const size_t bytes = static_cast<size_t>(round_up(static_cast<int64_t>(one.total()), 4096));
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(bytes * num_threads()));
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(base + bytes * thread);
    const auto count = static_cast<int64_t>(blocks_.size());
    run_tasks_ahead(count, [&](int64_t index, int64_t next, int thread) {
      const Block& after = blocks_[next < count ? next : index];
      attend(blocks_[index], {&after, after.head, first_chunk(after)}, base + bytes * thread);
    });
  }

 private:
  int64_t work(const Block& block) const {
    return (block.end - block.begin) * (seen_by(block, block.end - 1) - first_chunk(block));
  }

  // How many tokens the given token of a block's piece sees.
  int64_t seen_by(const Block& block, int64_t token) const {
    return c_.lengths[block.piece] - (c_.starts[block.piece + 1] - c_.starts[block.piece]) + token + 1;
  }

  // The first token that the given token of a block's piece sees.
  int64_t first_seen(const Block& block, int64_t token) const {
    return c_.window == 0 ? 0 : std::max<int64_t>(0, seen_by(block, token) - c_.window);
  }

  // Where the steps of a block's softmax begin: at the same tokens for every piece of a sequence.
  int64_t first_chunk(const Block& block) const { return first_seen(block, block.begin) / chunk_ * chunk_; }

  size_t element() const { return size_of(c_.dtype); }

  // The page of the given token of a block's sequence, for one head.
  Pages pages_at(const Block& block, int64_t head, int64_t token) const {
    const int64_t number = c_.tables[c_.table_starts[block.piece] + token / c_.page];
    const size_t at = static_cast<size_t>((number * c_.kv_heads + head) * c_.page * c_.dim) * element();
    return {{static_cast<const char*>(c_.k_pages) + at, c_.dtype, nullptr, c_.page, c_.dim},
            {static_cast<const char*>(c_.v_pages) + at, c_.dtype, nullptr, c_.dim, c_.page}};
  }

  // The page that is read in the place of the page at token `part` of a chunk; the last one where there are fewer.
  Pages page_of(const Next& next, int64_t part) const {
    const int64_t last = seen_by(*next.block, next.block->end - 1) - 1;
    return pages_at(*next.block, next.head, std::min(next.first + part, last));
  }

  // Row r of a block is query head r % group_ of its token r / group_.
  size_t row_offset(const Block& block, int64_t head, int64_t row, int64_t stride) const {
    const int64_t token = c_.starts[block.piece] + block.begin + row / group_;
    return static_cast<size_t>(token * stride + (head * group_ + row % group_) * c_.dim) * element();
  }

  // `after`: what is read when this block is done.
  void attend(const Block& block, const Next& after, char* scratch) const {
    const int64_t rows = (block.end - block.begin) * group_, heads = block.last_head - block.head;
    auto* state = reinterpret_cast<float*>(scratch + state_at_);
    auto* sums = reinterpret_cast<float*>(scratch + sums_at_);
    if (c_.window != 0) std::fill(sums, sums + heads * rows * padded_dim_, 0.0f);  // else the first chunk's are not added
    for (int64_t at = 0; at < heads * rows; ++at) {
      // The running maximum is of scores before they are scaled.
      const bool sinks = c_.sinks != nullptr;
      state[2 * at] = sinks ? c_.sinks[(block.head + at / rows) * group_ + at % rows % group_] / c_.scaling
                            : -std::numeric_limits<float>::infinity();
      state[2 * at + 1] = sinks ? 1.0f : 0.0f;
    }
    // A token's rows of one KV head lie one after the other.
    for (int64_t at = 0; at < heads * rows; at += group_)
      convert_row(scratch + queries_at_ + at * query_bytes(), row_dtype_,
                  static_cast<const char*>(c_.q) + row_offset(block, block.head + at / rows, at % rows, c_.q_stride),
                  c_.dtype, group_ * c_.dim);
    const Tiles tiles(0, rows, tile_.max_rows);
    const int64_t tokens = seen_by(block, block.end - 1);
    for (int64_t first = first_chunk(block); first < tokens; first += chunk_)
      for (int64_t head = 0; head < heads; ++head) {
        const Next next = head + 1 < heads          ? Next{&block, block.head + head + 1, first}
                          : first + chunk_ < tokens ? Next{&block, block.head, first + chunk_}
                                                    : after;
        const Rows own{scratch + queries_at_ + head * rows * query_bytes(), state + 2 * head * rows,
                       sums + head * rows * padded_dim_};
        for (int64_t tile = 0; tile < tiles.count; ++tile)
          attend_tile(block, block.head + head, first, next, tiles, tile, own, scratch);
      }
    for (int64_t at = 0; at < heads * rows; at += group_)
      write_token(block, block.head + at / rows, at % rows, sums + at * padded_dim_, state + 2 * at);
  }

  // The rows of one token for one KV head.
  void write_token(const Block& block, int64_t head, int64_t row, float* sums, const float* state) const {
    char* out = static_cast<char*>(c_.out) + row_offset(block, head, row, c_.q_heads * c_.dim);
    const int64_t out_bytes = c_.dim * static_cast<int64_t>(element());
    for (int64_t i = 0; i < group_; ++i)
      scale_row(sums + i * padded_dim_, sums + i * padded_dim_, 1.0f / state[2 * i + 1], c_.dim);
    if (padded_dim_ != c_.dim) {
      for (int64_t i = 0; i < group_; ++i) write_row(out + i * out_bytes, c_.dtype, sums + i * padded_dim_, c_.dim);
      return;
    }
    for (int64_t column = 0; column < c_.dim; column += kPanel)
      isa_.store(sums + column, padded_dim_, static_cast<int>(group_), c_.dtype,
                 out + column * static_cast<int64_t>(element()), out_bytes);
  }

  int64_t query_bytes() const { return c_.dim * static_cast<int64_t>(size_of(row_dtype_)); }

  // One tile of rows against the chunk that begins at token `first`: scores, weights, and what they add to the sums.
  void attend_tile(const Block& block, int64_t head, int64_t first, const Next& next, const Tiles& tiles, int64_t tile,
                   const Rows& own, char* scratch) const {
    const int64_t row = tiles.at(tile);
    const int m = tiles.size(tile);
    const int64_t most = std::min(chunk_, seen_by(block, block.begin + (row + m - 1) / group_) - first);
    if (most <= 0 || first_seen(block, block.begin + row / group_) >= first + chunk_) return;
    auto* scores = reinterpret_cast<float*>(scratch + scores_at_);
    float* state = own.state + 2 * row;
    float* sums = own.sums + row * padded_dim_;
    const char* queries = own.queries + row * query_bytes();
    for (int64_t part = 0; part < most; part += part_)
      score(pages_at(block, head, first + part), (first + part) % c_.page, std::min(part_, most - part), page_of(next, part),
            queries, scores + part, tiles, tile, scratch);
    char* weights = row_dtype_ == DType::kF32 ? scratch + scores_at_ : scratch + weights_at_;
    int64_t from[kMaxRows], seen[kMaxRows];
    for (int i = 0; i < m; ++i) {
      const int64_t token = block.begin + (row + i) / group_;
      from[i] = std::clamp<int64_t>(first_seen(block, token) - first, 0, chunk_);
      seen[i] = std::clamp<int64_t>(seen_by(block, token) - first, 0, chunk_);
    }
    isa_.softmax_step({m, scores, score_stride_, from, seen, round_up(most, kPanel), c_.scaling, state, row_dtype_, weights,
                       sums, padded_dim_});
    for (int64_t part = 0; part < most; part += part_)
      add_values(pages_at(block, head, first + part), (first + part) % c_.page, std::min(part_, most - part),
                 page_of(next, part), weights + part * static_cast<int64_t>(size_of(row_dtype_)), sums,
                 c_.window != 0 || first + part > 0, tiles, tile, scratch);
  }

  int64_t weight_bytes() const { return score_stride_ * static_cast<int64_t>(size_of(row_dtype_)); }

  // Scores against `count` tokens of a page from `offset` on, which is a multiple of the panel's width where it is not 0.
  void score(const Pages& here, int64_t offset, int64_t count, const Pages& next, const char* queries, float* scores,
             const Tiles& tiles, int64_t tile, char* scratch) const {
    for (int64_t done = 0; done < count; done += kPanel) {
      const int64_t panel = (offset + done) / kPanel;
      tile_.run({queries, query_bytes(), here.keys.ready_part(panel, scratch + spare_at_, 0, c_.dim), c_.dim,
                 tiles.size(tile), scores + done, score_stride_, false,
                 tiles.ahead(tile, next.keys.panel(done / kPanel), here.keys.panel_bytes(), tile_steps(c_.dtype, c_.dim))});
    }
  }

  // The weighted values of those tokens: the sums, or what is added to them.
  void add_values(const Pages& here, int64_t offset, int64_t count, const Pages& next, const char* weights, float* sums,
                  bool add, const Tiles& tiles, int64_t tile, char* scratch) const {
    // Of a pair of bf16 whose second token nobody sees, the weight of the second is zero.
    const int64_t k = std::min(part_, round_up(count, 2)), steps = tile_steps(c_.dtype, k);
    for (int64_t panel = 0; panel < here.values.panels(); ++panel)
      tile_.run({weights, weight_bytes(), here.values.ready_part(panel, scratch + spare_at_, offset, offset + k), k,
                 tiles.size(tile), sums + panel * kPanel, padded_dim_, add,
                 tiles.ahead(tile, next.values.panel(panel), kStepBytes * steps, steps)});
  }

  const AttentionCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;  // chained, so that a result does not depend on how pages cut the values' k
  const int64_t group_, tokens_per_block_;
  const int64_t chunk_, part_;  // tokens of a step of the softmax, and those of them that lie in one page
  const int64_t score_stride_, padded_dim_;
  std::vector<Block> blocks_;
  size_t queries_at_ = 0, sums_at_ = 0, state_at_ = 0, scores_at_ = 0, weights_at_ = 0, spare_at_ = 0;
};

}  // namespace

void run_attention(const AttentionCall& call) { Attention(call).run(); }

}  // namespace sgl_batch
