#include "attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
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

// What lies in one page of the tokens that a block meets in one step: `count` of them, from `offset` on.
struct Part {
  int64_t page, offset, count;
};

// The tokens, from `first` on, that a block meets in one step.
struct Chunk {
  const Block* block = nullptr;
  int64_t first = 0, num_parts = 0;
  Part parts[kChunk];
};

// Some rows of a block for one KV head. The first one is query head `query_head` of those of this KV head, of token `token` of
// the piece; the token's other heads follow, and then the next token's.
struct Rows {
  const Block* block;
  int64_t head, token, query_head;
  int count;
  char* queries;
  float* maxima;
  float* weight_sums;
  float* sums;
};

class Attention {
 public:
  explicit Attention(const AttentionCall& call)
      : c_(call),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(call.dtype)),
        tile_(isa_.tile(call.dtype)),
        blocks_cross_pages_(!tile_.chained && call.page % kBlockK != 0),
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
    maxima_at_ = one.take(static_cast<size_t>(rows + kSoftmaxRoom) * 4);
    weight_sums_at_ = one.take(static_cast<size_t>(rows + kSoftmaxRoom) * 4);
    scores_at_ = one.take(static_cast<size_t>(tile_.max_rows * score_stride_) * 4);
    weights_at_ = one.take(static_cast<size_t>(tile_.max_rows * score_stride_) * 4);
    spare_at_ = one.take(static_cast<size_t>(kPanel * std::max(c_.dim, c_.page)) * 4);
    block_at_ = one.take(static_cast<size_t>(tile_steps(c_.dtype, kBlockK) * kStepBytes));
    const size_t bytes = static_cast<size_t>(round_up(static_cast<int64_t>(one.total()), 4096));
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(bytes * num_threads()));
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(base + bytes * thread);
    const auto count = static_cast<int64_t>(blocks_.size());
    std::vector<Lead> leads;
    for (int thread = 0; thread < num_threads(); ++thread) leads.emplace_back(*this);
    run_tasks_ahead(count, [&](int64_t index, int64_t next, int thread) {
      const Block* after = next < count ? &blocks_[next] : nullptr;
      attend(blocks_[index], after, leads[static_cast<size_t>(thread)], base + bytes * thread);
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

  // One head's keys and values of a page.
  PackedWeight keys(int64_t page, int64_t head) const {
    return {at_page(c_.k_pages, page, head), c_.dtype, nullptr, c_.page, c_.dim};
  }
  PackedWeight values(int64_t page, int64_t head) const {
    return {at_page(c_.v_pages, page, head), c_.dtype, nullptr, c_.dim, c_.page};
  }
  const char* at_page(const void* pages, int64_t page, int64_t head) const {
    return static_cast<const char*>(pages) + static_cast<size_t>((page * c_.kv_heads + head) * c_.page * c_.dim) * element();
  }

  // The tokens that a block meets from `first` on. Returns false if there are none.
  bool take(Chunk& chunk, const Block& block, int64_t first) const {
    const int64_t tokens = std::min(chunk_, seen_by(block, block.end - 1) - first);
    chunk.block = &block;
    chunk.first = first;
    chunk.num_parts = 0;
    for (int64_t at = 0; at < tokens; at += part_)
      chunk.parts[chunk.num_parts++] = {c_.tables[c_.table_starts[block.piece] + (first + at) / c_.page],
                                        (first + at) % c_.page, std::min(part_, tokens - at)};
    return tokens > 0;
  }

  // Goes through the pages in the order in which a thread reads them, kLead bytes ahead of its tiles, so that each of them
  // brings closer what is read that much later, and as many bytes as it reads itself. Without that a chunk of few tokens would
  // have to bring a whole one.
  class alignas(2 * kLineBytes) Lead {
   public:
    explicit Lead(const Attention& all) : all_(all) {}

    // The thread begins one block, and knows which one comes after, or none.
    void enter(const Block& block, const Block* after) {
      after_ = after;
      if (last_ != &block) {
        begin(&block);
        owed_ = 0;
        for (int64_t skipped = 0; skipped < kLead && next_run(); at_ = end_) skipped += end_ - at_;
      } else if (chunk_.block == nullptr) {
        begin(std::exchange(after_, nullptr));  // a block of less than the lead
      }
    }

    // The tiles that follow read so many bytes for the first time.
    void owe(int64_t bytes) { owed_ += bytes; }

    // What a tile of so many steps over `panel` brings.
    Ahead bring(const void* panel, int64_t steps) {
      const int64_t most = steps * kStepBytes;
      while (owed_ > 0 && (at_ < end_ || next_run())) {
        const char* from = at_;
        const int64_t bytes = std::min({static_cast<int64_t>(end_ - at_), owed_, most});
        at_ += bytes;
        owed_ -= bytes;
        if (2 * bytes >= most || owed_ <= 0) return {from, divide_up(bytes, steps)};
        for (int64_t line = 0; line < bytes; line += kLineBytes) __builtin_prefetch(from + line, 0, 2);
      }
      return {panel, 0};
    }

   private:
    static constexpr int64_t kLead = 32 << 10;

    void begin(const Block* block) {
      at_ = end_ = nullptr;
      run_ = 0;
      chunk_.block = block;
      if (block == nullptr) return;
      last_ = block;
      head_ = block->head;
      all_.take(chunk_, *block, all_.first_chunk(*block));
    }

    // Goes on to the next bytes that lie together. Returns false once all is read that the thread knows of.
    bool next_run() {
      if (chunk_.block == nullptr) return false;
      const int64_t panels = divide_up(all_.c_.dim, kPanel);
      if (run_ == chunk_.num_parts * (1 + panels)) {
        run_ = 0;
        if (++head_ == chunk_.block->last_head) {
          head_ = chunk_.block->head;
          if (!all_.take(chunk_, *chunk_.block, chunk_.first + all_.chunk_)) begin(std::exchange(after_, nullptr));
          if (chunk_.block == nullptr) return false;
        }
      }
      if (run_ < chunk_.num_parts) {
        const Part& part = chunk_.parts[run_++];
        const PackedWeight keys = all_.keys(part.page, head_);
        at_ = keys.panel(part.offset / kPanel);
        end_ = at_ + divide_up(part.count, kPanel) * keys.panel_bytes();
        return true;
      }
      const int64_t number = run_ - chunk_.num_parts;
      const Part& part = chunk_.parts[number / panels];
      const PackedWeight values = all_.values(part.page, head_);
      at_ = values.panel(number % panels) + tile_steps(values.dtype, part.offset) * kStepBytes;
      end_ = at_ + tile_steps(values.dtype, part.count) * kStepBytes;
      // Panels of a whole page lie one after the other.
      const bool is_whole = part.count == all_.c_.page;
      if (is_whole) end_ = at_ + panels * values.panel_bytes();
      run_ += is_whole ? panels : 1;
      return true;
    }

    const Attention& all_;
    const Block* after_ = nullptr;
    const Block* last_ = nullptr;  // the last one that it has begun
    Chunk chunk_;
    int64_t head_ = 0, run_ = 0, owed_ = 0;
    const char* at_ = nullptr;
    const char* end_ = nullptr;
  };

  // `after` is what comes next, or null.
  void attend(const Block& block, const Block* after, Lead& lead, char* scratch) const {
    const int64_t rows = (block.end - block.begin) * group_, heads = block.last_head - block.head;
    const Tiles tiles(0, rows, tile_.max_rows);
    const int64_t start = first_chunk(block);
    const bool is_one = start + chunk_ >= seen_by(block, block.end - 1);  // then tiles come one after the other, in one place
    const TileUse use(tile_);
    lead.enter(block, after);
    Chunk chunk;
    for (int64_t first = start; take(chunk, block, first); first += chunk_) {
      const int64_t tile_bytes = chunk_bytes(chunk) / tiles.count;
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          const int64_t row = tiles.at(tile), place = is_one ? 0 : head * rows + row;
          Rows own = rows_of(block, block.head + head, row, tiles.size(tile));
          own.queries = scratch + queries_at_ + place * query_bytes();
          own.maxima = reinterpret_cast<float*>(scratch + maxima_at_) + place;
          own.weight_sums = reinterpret_cast<float*>(scratch + weight_sums_at_) + place;
          own.sums = reinterpret_cast<float*>(scratch + sums_at_) + place * padded_dim_;
          if (first == start) {
            begin(own);
            const int64_t next = row + own.count;
            if (next < rows)
              bring_queries(block, own.head, next);
            else if (head + 1 < heads)
              bring_queries(block, own.head + 1, 0);
            else if (after != nullptr)
              bring_queries(*after, after->head, 0);
          }
          lead.owe(tile_bytes);
          attend_tile(chunk, own, lead, scratch);
        }
    }
  }

  // What the tiles read of a chunk, for one head.
  int64_t chunk_bytes(const Chunk& chunk) const {
    int64_t bytes = 0;
    for (int64_t part = 0; part < chunk.num_parts; ++part)
      bytes += (round_up(chunk.parts[part].count, kPanel) + round_up(chunk.parts[part].count, 2)) * padded_dim_;
    return bytes * static_cast<int64_t>(element());
  }

  int64_t query_bytes() const { return c_.dim * static_cast<int64_t>(size_of(row_dtype_)); }
  int64_t weight_bytes() const { return score_stride_ * static_cast<int64_t>(size_of(row_dtype_)); }

  Rows rows_of(const Block& block, int64_t head, int64_t row, int64_t count) const {
    return {&block, head, block.begin + row / group_, row % group_, static_cast<int>(count), nullptr, nullptr, nullptr,
            nullptr};
  }

  // Calls each(token, first, last) for the tokens to which rows belong, and those rows of theirs, counted from the first one.
  template <typename Each>
  void by_token(const Rows& rows, const Each& each) const {
    int64_t token = rows.token, end = group_ - rows.query_head;
    for (int64_t at = 0; at < rows.count; at = end, end += group_, ++token) each(token, at, std::min<int64_t>(end, rows.count));
  }

  // Where a token's row lies in q or in the result, `stride` numbers a token: for one KV head one after the other.
  int64_t offset(const Rows& rows, int64_t token, int64_t row, int64_t stride) const {
    const int64_t query_head = rows.head * group_ + rows.query_head + row - (token - rows.token) * group_;
    return ((c_.starts[rows.block->piece] + token) * stride + query_head * c_.dim) * static_cast<int64_t>(element());
  }
  const char* query_at(const Rows& rows, int64_t token, int64_t row) const {
    return static_cast<const char*>(c_.q) + offset(rows, token, row, c_.q_stride);
  }
  char* out_at(const Rows& rows, int64_t token, int64_t row) const {
    return static_cast<char*>(c_.out) + offset(rows, token, row, c_.q_heads * c_.dim);
  }

  // Brings the queries of a tile of rows, from the given one on, closer.
  void bring_queries(const Block& block, int64_t head, int64_t row) const {
    const Rows rows = rows_of(block, head, row, std::min<int64_t>(tile_.max_rows, (block.end - block.begin) * group_ - row));
    by_token(rows, [&](int64_t token, int64_t first, int64_t last) {
      fetch(query_at(rows, token, first), static_cast<size_t>((last - first) * c_.dim) * element());
    });
  }

  // Queries and the state before the first chunk.
  void begin(const Rows& own) const {
    by_token(own, [&](int64_t token, int64_t first, int64_t last) {
      convert_row(own.queries + first * query_bytes(), row_dtype_, query_at(own, token, first), c_.dtype,
                  (last - first) * c_.dim);
    });
    // Sums of the first chunk are not added to these, unless rows see it at different places.
    if (c_.window != 0) std::fill(own.sums, own.sums + own.count * padded_dim_, 0.0f);
    for (int64_t at = 0; at < own.count; ++at) {
      // The running maximum is of scores before they are scaled.
      const bool sinks = c_.sinks != nullptr;
      own.maxima[at] = sinks ? c_.sinks[own.head * group_ + (own.query_head + at) % group_] / c_.scaling
                             : -std::numeric_limits<float>::infinity();
      own.weight_sums[at] = sinks ? 1.0f : 0.0f;
    }
  }

  // One tile of rows against a chunk: scores, weights, and what they add to the sums. The last chunk's sums are the result.
  void attend_tile(const Chunk& chunk, const Rows& own, Lead& lead, char* scratch) const {
    const Block& block = *chunk.block;
    const int64_t left = seen_by(block, own.token + (own.query_head + own.count - 1) / group_) - chunk.first;
    const int64_t most = std::min(chunk_, left);
    if (most <= 0 || first_seen(block, own.token) >= chunk.first + chunk_) return;
    if (left <= chunk_) bring_out(own);
    auto* scores = reinterpret_cast<float*>(scratch + scores_at_);
    Tile call{own.queries, query_bytes(), nullptr, c_.dim, own.count, nullptr, score_stride_, false, {}};
    for (int64_t at = 0; at < most; at += part_) {
      const Part& part = chunk.parts[at / part_];
      const PackedWeight page = keys(part.page, own.head);
      const int64_t count = std::min(part_, most - at);
      for (int64_t done = 0; done < count; done += kPanel) {
        call.panel = page.ready_part((part.offset + done) / kPanel, scratch + spare_at_, 0, c_.dim);
        call.c = scores + at + done;
        call.ahead = lead.bring(call.panel, tile_steps(c_.dtype, call.k));
        tile_.run(call);
      }
    }
    char* weights = row_dtype_ == DType::kF32 ? scratch + scores_at_ : scratch + weights_at_;
    int64_t from[kMaxRows], seen[kMaxRows];
    by_token(own, [&](int64_t token, int64_t first, int64_t last) {
      std::fill(from + first, from + last, std::clamp<int64_t>(first_seen(block, token) - chunk.first, 0, chunk_));
      std::fill(seen + first, seen + last, std::clamp<int64_t>(seen_by(block, token) - chunk.first, 0, chunk_));
    });
    isa_.softmax_step({own.count, scores, score_stride_, from, seen, round_up(most, kPanel), c_.scaling, own.maxima,
                       own.weight_sums, row_dtype_, weights, own.sums, padded_dim_});
    call.a_stride = weight_bytes();
    call.c_stride = padded_dim_;
    const int64_t step = blocks_cross_pages_ ? kBlockK : part_;
    for (int64_t at = 0; at < most; at += step) {
      // Of a pair of bf16 whose second token nobody sees, the weight of the second is zero.
      call.k = std::min(step, round_up(most - at, 2));
      call.a = weights + at * static_cast<int64_t>(size_of(row_dtype_));
      call.add = c_.window != 0 || chunk.first + at > 0;
      for (int64_t panel = 0; panel < divide_up(c_.dim, kPanel); ++panel) {
        const Part& part = chunk.parts[at / part_];
        if (blocks_cross_pages_)
          call.panel = block_of_values(chunk, own.head, panel, at, call.k, scratch);
        else
          call.panel = values(part.page, own.head).ready_part(panel, scratch + spare_at_, part.offset, part.offset + call.k);
        call.c = own.sums + panel * kPanel;
        call.ahead = lead.bring(call.panel, tile_steps(c_.dtype, call.k));
        tile_.run(call);
      }
    }
    if (left <= chunk_) write(own);
  }

  // A panel of the values of `count` of a chunk's tokens, from `at` on, copied from the pages where they lie.
  const void* block_of_values(const Chunk& chunk, int64_t head, int64_t panel, int64_t at, int64_t count, char* scratch) const {
    char* block = scratch + block_at_;
    for (const int64_t end = at + count; at < end;) {
      const Part& part = chunk.parts[at / part_];
      const int64_t offset = part.offset + at % part_, some = std::min(end - at, part_ - at % part_);
      const size_t bytes = static_cast<size_t>(tile_steps(c_.dtype, some) * kStepBytes);
      const void* from = values(part.page, head).ready_part(panel, scratch + spare_at_, offset, offset + some);
      std::memcpy(block, from, bytes);
      block += bytes;
      at += some;
    }
    return scratch + block_at_;
  }

  // Brings the memory of a tile's result to the first cache, so that it waits for none.
  void bring_out(const Rows& own) const {
    by_token(own, [&](int64_t token, int64_t first, int64_t last) {
      fetch_to_write(out_at(own, token, first), static_cast<size_t>((last - first) * c_.dim) * element());
    });
  }

  void write(const Rows& own) const {
    by_token(own, [&](int64_t token, int64_t first, int64_t last) {
      char* out = out_at(own, token, first);
      for (int64_t at = first; at < last; ++at, out += c_.dim * static_cast<int64_t>(element()))
        isa_.store_scaled(own.sums + at * padded_dim_, 1.0f / own.weight_sums[at], c_.dim, c_.dtype, out);
    });
  }

  const AttentionCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;
  // A page may end within a block of the values' k. The tile does not cut its sums there, so that blocks are put together first:
  // a result does not depend on how pages cut them.
  const bool blocks_cross_pages_;
  const int64_t group_, tokens_per_block_;
  const int64_t chunk_, part_;  // tokens of a step of the softmax, and those of them that lie in one page
  const int64_t score_stride_, padded_dim_;
  std::vector<Block> blocks_;
  size_t queries_at_ = 0, sums_at_ = 0, maxima_at_ = 0, weight_sums_at_ = 0, scores_at_ = 0, weights_at_ = 0;
  size_t spare_at_ = 0, block_at_ = 0;
};

}  // namespace

void run_attention(const AttentionCall& call) { Attention(call).run(); }

}  // namespace sgl_batch
