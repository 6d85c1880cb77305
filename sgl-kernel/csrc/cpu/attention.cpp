#include "attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "attention_pages.h"
#include "packing.h"
#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

constexpr int64_t kRowsPerBlock = 96;  // rows (tokens x query heads of one KV head) that share a pass over the pages
constexpr int64_t kRowsPerWideBlock = 192;  // the same where what they meet is widened for all of them at once
constexpr int64_t kTilesThatWiden = 3;  // fewer widen what they meet themselves

// Rows [first, last) of a tile, which are of one token: where they begin in q and in the result, and how many tokens it sees.
struct Run {
  int first, last;
  const char* query;
  char* out;
  int64_t sees;
};

// Some rows of a block for one KV head, which make one tile: a token's query heads one after the other, then the next token's.
// `place` is that of the first row among those whose state is kept.
struct Rows {
  int64_t head, query_head;  // KV head, and the first row's among those of it
  int64_t place;
  int count, num_runs;
  Run* runs;
};

class Attention {
 public:
  explicit Attention(const AttentionCall& call)
      : c_(call),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(call.dtype)),
        tile_(isa_.tile(call.dtype)),
        is_widened_(row_dtype_ != call.dtype && tile_.run_kept != nullptr),
        blocks_cross_pages_(!tile_.chained && call.page % kBlockK != 0),
        pages_(call),
        group_(pages_.group()),
        tokens_per_block_(std::max<int64_t>(1, (is_widened_ ? kRowsPerWideBlock : kRowsPerBlock) / group_)),
        rows_per_step_(std::max<int64_t>(tile_.cut.usual_rows(), kSharedRows)),
        chunk_(pages_.chunk()),
        part_(pages_.part()),
        // Products of a page of fewer tokens than a panel has go past its part of a row.
        score_stride_(round_up(chunk_, kPanel) + (part_ < kPanel ? kPanel : 0)),
        padded_dim_(round_up(call.dim, kPanel)),
        key_panels_(divide_up(part_, kPanel)),
        element_(static_cast<int64_t>(size_of(call.dtype))),
        row_bytes_(call.dim * element_),
        query_token_bytes_(call.q_stride * element_),
        out_token_bytes_(call.q_heads * row_bytes_) {
    int64_t count = 0;
    for (int64_t piece = 0; piece < c_.pieces; ++piece)
      count += divide_up(c_.starts[piece + 1] - c_.starts[piece], tokens_per_block_);
    const bool enough = count >= kTasksPerThread * num_threads();
    for (int64_t piece = 0; piece < c_.pieces; ++piece) {
      // The heads of a page lie one after the other: where there are blocks enough, one of few rows takes them all.
      const int64_t tokens = c_.starts[piece + 1] - c_.starts[piece];
      const int64_t heads = enough && tokens * c_.q_heads <= tokens_per_block_ * group_ ? c_.kv_heads : 1;
      for (int64_t head = 0; head < c_.kv_heads; head += heads)
        // Those that see most come first.
        for (int64_t number = divide_up(tokens, tokens_per_block_); number-- > 0;) {
          const int64_t token = number * tokens_per_block_;
          blocks_.push_back({piece, head, head + heads, token, std::min(tokens, token + tokens_per_block_)});
        }
    }
    shares_ = share_blocks(
        blocks_, [this](const AttentionBlock& block) { return work(block); },
        [this](const AttentionBlock& block) { return c_.lengths[block.piece]; });
  }

  void run() {
    Carver one;
    const int64_t rows = tokens_per_block_ * group_;
    queries_at_ = one.take(static_cast<size_t>(rows * c_.dim) * 4);
    sums_at_ = one.take(static_cast<size_t>(rows * padded_dim_) * 4);
    maxima_at_ = one.take(static_cast<size_t>(rows + kSoftmaxRoom) * 4);
    weight_sums_at_ = one.take(static_cast<size_t>(rows + kSoftmaxRoom) * 4);
    scores_at_ = one.take(static_cast<size_t>(rows_per_step_ * score_stride_) * 4);
    weights_at_ = one.take(static_cast<size_t>(rows_per_step_ * score_stride_) * 4);
    spare_at_ = one.take(static_cast<size_t>(kPanel * std::max(c_.dim, c_.page)) * 4);
    keys_at_ = one.take(is_widened_ ? static_cast<size_t>(chunk_ / part_ * key_panels_ * c_.dim * kPanel) * 4 : 0);
    values_at_ = one.take(is_widened_ ? static_cast<size_t>(round_up(chunk_, 2) * padded_dim_) * 4 : 0);
    block_at_ = one.take(static_cast<size_t>(tile_steps(c_.dtype, kBlockK) * kStepBytes));
    tiles_at_ = one.take(static_cast<size_t>(rows) * sizeof(Rows));
    runs_at_ = one.take(static_cast<size_t>(rows + kMaxRows) * sizeof(Run));
    const size_t bytes = static_cast<size_t>(round_up(static_cast<int64_t>(one.total()), 4096));
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(bytes * num_threads()));
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(base + bytes * thread);
    const auto count = static_cast<int64_t>(blocks_.size());
    std::vector<AttentionLead> leads;
    for (int thread = 0; thread < num_threads(); ++thread) leads.emplace_back(pages_);
    run_tasks_ahead(shares_, [&](int64_t index, int64_t next, int thread) {
      const AttentionBlock* after = next < count ? &blocks_[next] : nullptr;
      attend(blocks_[index], after, leads[static_cast<size_t>(thread)], base + bytes * thread);
    });
  }

 private:
  int64_t work(const AttentionBlock& block) const {
    const int64_t rows = (block.end - block.begin) * (block.last_head - block.head);
    return rows * (pages_.seen_by(block, block.end - 1) - pages_.first_chunk(block));
  }

  // `after` is what comes next, or null.
  void attend(const AttentionBlock& block, const AttentionBlock* after, AttentionLead& lead, char* scratch) const {
    const int64_t rows = (block.end - block.begin) * group_, start = pages_.first_chunk(block);
    const Tiles tiles(0, rows, TileCut{tile_.cut.usual_rows()});
    const int64_t count = tiles.count * (block.last_head - block.head);
    const int64_t per_step = rows <= kSharedRows ? tiles.count * pages_.heads_per_step(block, block.head) : 1;
    // Within one chunk steps come one after the other, in one place.
    const bool is_one = start + chunk_ >= pages_.seen_by(block, block.end - 1);
    Rows* const all = reinterpret_cast<Rows*>(scratch + tiles_at_);
    Run* runs = reinterpret_cast<Run*>(scratch + runs_at_);
    for (int64_t tile = 0, place = 0; tile < count; ++tile) {
      const int64_t of_head = tile % tiles.count;
      all[tile] = find_rows(block, block.head + tile / tiles.count, tiles.at(of_head), tiles.size(of_head), runs);
      runs += all[tile].num_runs;
      if (is_one && tile % per_step == 0) place = 0;
      all[tile].place = place;
      place += all[tile].count;
    }
    const TileUse use(tile_);
    const bool widens = is_widened_ && tiles.count >= kTilesThatWiden;
    lead.enter(block, after);
    AttentionChunk chunk;
    for (int64_t first = start; pages_.take(chunk, block, first); first += chunk_) {
      const int64_t tile_bytes = chunk_bytes(chunk) / tiles.count;
      for (int64_t tile = 0, end; tile < count; tile = end) {
        end = std::min(count, tile + per_step);
        // A step of several tiles of a head takes them all.
        if (widens && tile % tiles.count == 0) widen(chunk, all[tile].head, scratch);
        for (int64_t each = tile; each < end && first == start; ++each) {
          begin(all[each], scratch);
          if (each + 1 < count)
            bring_queries(all[each + 1]);
          else if (after != nullptr)
            bring_first_queries(*after, runs);
        }
        lead.owe(tile_bytes * (end - tile));
        attend_step(chunk, all + tile, end - tile, widens, lead, scratch);
      }
    }
  }

  // What the tiles read of a chunk, for one head.
  int64_t chunk_bytes(const AttentionChunk& chunk) const {
    int64_t bytes = 0;
    for (int64_t part = 0; part < chunk.num_parts; ++part)
      bytes += (round_up(chunk.parts[part].count, kPanel) + round_up(chunk.parts[part].count, 2)) * padded_dim_;
    return bytes * element_;
  }

  int64_t query_bytes() const { return c_.dim * static_cast<int64_t>(size_of(row_dtype_)); }
  int64_t weight_bytes() const { return score_stride_ * static_cast<int64_t>(size_of(row_dtype_)); }

  // Rows from the given one of a block on, for one of its KV heads. Their runs go to `runs`.
  Rows find_rows(const AttentionBlock& block, int64_t head, int64_t row, int count, Run* runs) const {
    const int group = static_cast<int>(group_), of_block = static_cast<int>(row), query_head = of_block % group;
    const int64_t token = block.begin + of_block / group, at_head = (head * group_ + query_head) * row_bytes_;
    const int64_t of_call = c_.starts[block.piece] + token;
    const char* query = static_cast<const char*>(c_.q) + of_call * query_token_bytes_ + at_head;
    char* out = static_cast<char*>(c_.out) + of_call * out_token_bytes_ + at_head;
    int64_t sees = pages_.seen_by(block, token), before = query_head * row_bytes_;
    int num_runs = 0;
    for (int first = 0, last = group - query_head; first < count; first = last, last += group) {
      runs[num_runs++] = {first, std::min(last, count), query, out, sees++};
      query += query_token_bytes_ - before;
      out += out_token_bytes_ - before;
      before = 0;
    }
    return {head, query_head, 0, count, num_runs, runs};
  }

  size_t bytes_of(const Run& run) const { return static_cast<size_t>((run.last - run.first) * row_bytes_); }

  // Brings the queries of a tile of rows closer.
  void bring_queries(const Rows& rows) const {
    for (int i = 0; i < rows.num_runs; ++i) fetch(rows.runs[i].query, bytes_of(rows.runs[i]));
  }

  // Those of a block's first tile; `runs`: room for its runs.
  void bring_first_queries(const AttentionBlock& block, Run* runs) const {
    const int64_t rows = (block.end - block.begin) * group_;
    bring_queries(find_rows(block, block.head, 0, Tiles(0, rows, TileCut{tile_.cut.usual_rows()}).size(0), runs));
  }

  char* queries(const Rows& own, char* scratch) const { return scratch + queries_at_ + own.place * query_bytes(); }
  float* maxima(const Rows& own, char* scratch) const { return reinterpret_cast<float*>(scratch + maxima_at_) + own.place; }
  float* weight_sums(const Rows& own, char* scratch) const {
    return reinterpret_cast<float*>(scratch + weight_sums_at_) + own.place;
  }
  float* sums(const Rows& own, char* scratch) const {
    return reinterpret_cast<float*>(scratch + sums_at_) + own.place * padded_dim_;
  }

  // Queries and the state before the first chunk.
  void begin(const Rows& own, char* scratch) const {
    for (int i = 0; i < own.num_runs; ++i) {
      const Run& run = own.runs[i];
      convert_row(queries(own, scratch) + run.first * query_bytes(), row_dtype_, run.query, c_.dtype,
                  (run.last - run.first) * c_.dim);
    }
    // Sums of the first chunk are not added to these, unless rows see it at different places.
    if (c_.window != 0) std::fill_n(sums(own, scratch), own.count * padded_dim_, 0.0f);
    // The running maximum is of scores before they are scaled.
    float *const most = maxima(own, scratch), *const weights = weight_sums(own, scratch);
    std::fill_n(most, own.count, -std::numeric_limits<float>::infinity());
    std::fill_n(weights, own.count, c_.sinks == nullptr ? 0.0f : 1.0f);
    if (c_.sinks == nullptr) return;
    for (int64_t at = 0; at < own.count; ++at)
      most[at] = c_.sinks[own.head * group_ + (own.query_head + at) % group_] / c_.scaling;
  }

  // Some tiles of rows against a chunk: scores, weights, and what they add to the sums. The last chunk's sums are the result.
  void attend_step(const AttentionChunk& chunk, const Rows* tiles, int64_t num_tiles, bool is_wide, AttentionLead& lead,
                   char* scratch) const {
    // Tiles that share a step are of all rows of their heads.
    const Rows &first_rows = tiles[0], &last_rows = tiles[num_tiles - 1];
    const int64_t left = last_rows.runs[last_rows.num_runs - 1].sees - chunk.first, most = std::min(chunk_, left);
    if (most <= 0 || pages_.hidden_from(first_rows.runs[0].sees) >= chunk.first + chunk_) return;
    auto* scores = reinterpret_cast<float*>(scratch + scores_at_);
    const bool coarse = c_.dtype == DType::kBf16;
    char* weights = scratch + (coarse ? weights_at_ : scores_at_);
    int64_t from[kMaxRows], seen[kMaxRows], row = 0;
    for (const Rows& own : std::span(tiles, static_cast<size_t>(num_tiles))) {
      score(chunk, own, most, is_wide, lead, scores + row * score_stride_, scratch);
      if (left <= chunk_) bring_out(own);
      for (int i = 0; i < own.num_runs; ++i) {
        const Run& run = own.runs[i];
        const int64_t first = std::clamp<int64_t>(pages_.hidden_from(run.sees) - chunk.first, 0, chunk_);
        const int64_t end = std::clamp<int64_t>(run.sees - chunk.first, 0, chunk_);
        for (int count = run.last - run.first; count > 0; --count, ++row) from[row] = first, seen[row] = end;
      }
    }
    isa_.softmax_step({static_cast<int>(row), scores, score_stride_, from, seen, round_up(most, kPanel), c_.scaling,
                       maxima(first_rows, scratch), weight_sums(first_rows, scratch), row_dtype_, weights,
                       sums(first_rows, scratch), padded_dim_, coarse});
    for (const Rows& own : std::span(tiles, static_cast<size_t>(num_tiles))) {
      if (is_wide)
        add_wide_values(chunk, own, most, lead, weights, scratch);
      else
        add_values(chunk, own, most, lead, weights, scratch);
      if (left <= chunk_) write(own, scratch);
      weights += own.count * weight_bytes();
    }
  }

  // Keys and values of a chunk as rows of f32 meet them.
  void widen(const AttentionChunk& chunk, int64_t head, char* scratch) const {
    float* keys = wide_keys(scratch);
    int64_t at = 0;
    for (const PagePart& part : std::span(chunk.parts, static_cast<size_t>(chunk.num_parts))) {
      const PackedWeight of_keys = pages_.keys(part.page, head), of_values = pages_.values(part.page, head);
      for (int64_t panel = 0; panel * kPanel < part.count; ++panel)
        isa_.widen_panel(of_keys.ready_part(part.offset / kPanel + panel, scratch + spare_at_, 0, c_.dim),
                         tile_steps(c_.dtype, c_.dim), keys + panel * c_.dim * kPanel);
      keys += key_panels_ * c_.dim * kPanel;
      const int64_t steps = tile_steps(c_.dtype, part.count);
      for (int64_t panel = 0; panel * kPanel < c_.dim; ++panel)
        isa_.widen_panel(of_values.ready_part(panel, scratch + spare_at_, part.offset, part.offset + 2 * steps), steps,
                         wide_values(panel, scratch) + at * kPanel);
      at += part.count;
    }
  }

  float* wide_keys(char* scratch) const { return reinterpret_cast<float*>(scratch + keys_at_); }
  // Of one panel for all tokens of a chunk.
  float* wide_values(int64_t panel, char* scratch) const {
    return reinterpret_cast<float*>(scratch + values_at_) + panel * round_up(chunk_, 2) * kPanel;
  }

  // The scores of a tile's rows for the first `most` tokens of a chunk, whose keys may have been widened.
  void score(const AttentionChunk& chunk, const Rows& own, int64_t most, bool is_wide, AttentionLead& lead, float* scores,
             char* scratch) const {
    Tile call{queries(own, scratch), query_bytes(), nullptr, c_.dim, own.count, nullptr, score_stride_, false, {}};
    const int64_t steps = tile_steps(c_.dtype, c_.dim);
    const PagePart* part = chunk.parts;
    const float* wide = wide_keys(scratch);
    const TileFn run = is_wide ? tile_.run_kept : tile_.run, run_half = is_wide ? tile_.run_kept_half : tile_.run_half;
    for (int64_t at = 0; at < most; at += part_, ++part, wide += key_panels_ * c_.dim * kPanel) {
      const PackedWeight page = pages_.keys(part->page, own.head);
      const int64_t count = std::min(part_, most - at);
      for (int64_t done = 0; done < count; done += kPanel) {
        if (is_wide)
          call.panel = wide + done * c_.dim;
        else
          call.panel = page.ready_part((part->offset + done) / kPanel, scratch + spare_at_, 0, c_.dim);
        call.c = scores + at + done;
        call.ahead = lead.bring(call.panel, steps);
        (2 * (count - done) <= kPanel && run_half != nullptr ? run_half : run)(call);
      }
    }
  }

  // Adds to a tile's sums the values of the first `most` tokens of a chunk by their weights.
  void add_values(const AttentionChunk& chunk, const Rows& own, int64_t most, AttentionLead& lead, const char* weights,
                  char* scratch) const {
    Tile call{weights, weight_bytes(), nullptr, 0, own.count, nullptr, padded_dim_, false, {}};
    const int64_t block = blocks_cross_pages_ ? kBlockK : part_;
    const bool in_pairs = tile_.run_two != nullptr && !blocks_cross_pages_ && c_.dim % kPanel == 0;
    float* const own_sums = sums(own, scratch);
    for (int64_t at = 0, step; at < most; at += step) {
      // Of a pair of bf16 whose second token nobody sees, the weight of the second is zero.
      const int64_t left = round_up(most - at, 2);
      const bool two = in_pairs && left > block;
      step = two ? 2 * block : block;
      call.k = std::min(block, left);
      call.a = weights + at * static_cast<int64_t>(size_of(row_dtype_));
      call.add = c_.window != 0 || chunk.first + at > 0;
      const PagePart* const part = chunk.parts + at / part_;
      const PackedWeight page = pages_.values(part->page, own.head);
      const int64_t k = std::min(step, left);
      for (int64_t panel = 0, column = 0; column < c_.dim; ++panel, column += kPanel) {
        if (blocks_cross_pages_)
          call.panel = block_of_values(chunk, own.head, panel, at, call.k, scratch);
        else
          call.panel = page.ready_part(panel, scratch + spare_at_, part->offset, part->offset + call.k);
        call.c = own_sums + column;
        call.ahead = lead.bring(call.panel, tile_steps(c_.dtype, k));
        if (two) {
          const PackedWeight second = pages_.values(part[1].page, own.head);
          tile_.run_two(call, second.ready_part(panel, nullptr, part[1].offset, part[1].offset + k - call.k), k - call.k);
        } else {
          tile_.run(call);
        }
      }
    }
  }

  // The same where they have been widened.
  void add_wide_values(const AttentionChunk& chunk, const Rows& own, int64_t most, AttentionLead& lead, const char* weights,
                       char* scratch) const {
    const int64_t k = round_up(most, 2);
    Tile call{weights, weight_bytes(), nullptr, k, own.count, nullptr, padded_dim_, c_.window != 0 || chunk.first > 0, {}};
    for (int64_t panel = 0, column = 0; column < c_.dim; ++panel, column += kPanel) {
      call.panel = wide_values(panel, scratch);
      call.c = sums(own, scratch) + column;
      call.ahead = lead.bring(call.panel, k / 2);
      tile_.run_kept(call);
    }
  }

  // A panel of the values of `count` of a chunk's tokens, from `at` on, copied from the pages where they lie.
  const void* block_of_values(const AttentionChunk& chunk, int64_t head, int64_t panel, int64_t at, int64_t count,
                              char* scratch) const {
    char* block = scratch + block_at_;
    for (const int64_t end = at + count; at < end;) {
      const PagePart& part = chunk.parts[at / part_];
      const int64_t offset = part.offset + at % part_, some = std::min(end - at, part_ - at % part_);
      const size_t bytes = static_cast<size_t>(tile_steps(c_.dtype, some) * kStepBytes);
      const void* from = pages_.values(part.page, head).ready_part(panel, scratch + spare_at_, offset, offset + some);
      std::memcpy(block, from, bytes);
      block += bytes;
      at += some;
    }
    return scratch + block_at_;
  }

  // Brings the memory of a tile's result to the first cache, so that it waits for none.
  void bring_out(const Rows& own) const {
    for (int i = 0; i < own.num_runs; ++i) fetch_to_write(own.runs[i].out, bytes_of(own.runs[i]));
  }

  void write(const Rows& own, char* scratch) const {
    float factors[kMaxRows];
    const float *const weights = weight_sums(own, scratch), *const own_sums = sums(own, scratch);
    for (int at = 0; at < own.count; ++at) factors[at] = 1.0f / weights[at];
    for (int i = 0; i < own.num_runs; ++i) {
      const Run& run = own.runs[i];
      isa_.store_scaled(own_sums + run.first * padded_dim_, padded_dim_, factors + run.first, run.last - run.first, c_.dim,
                        c_.dtype, run.out);
    }
  }

  const AttentionCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;
  const bool is_widened_;  // keys and values, for all of a block's tiles at once, where these are enough
  // A page may end within a block of the values' k. The tile does not cut its sums there, so that blocks are put together
  // first: a result does not depend on how pages cut them.
  const bool blocks_cross_pages_;
  const AttentionPages pages_;
  const int64_t group_, tokens_per_block_;
  const int64_t rows_per_step_;  // at most
  const int64_t chunk_, part_;  // tokens of a step of the softmax, and those of them that lie in one page
  const int64_t score_stride_, padded_dim_;
  const int64_t key_panels_;  // of a part
  const int64_t element_, row_bytes_;  // a number of q and of the pages, and as many as a head has of them
  const int64_t query_token_bytes_, out_token_bytes_;  // from token to token in q and the result
  std::vector<AttentionBlock> blocks_;
  ShareBounds shares_;
  size_t queries_at_ = 0, sums_at_ = 0, maxima_at_ = 0, weight_sums_at_ = 0, scores_at_ = 0, weights_at_ = 0;
  size_t spare_at_ = 0, block_at_ = 0, keys_at_ = 0, values_at_ = 0, tiles_at_ = 0, runs_at_ = 0;
};

}  // namespace

void run_attention(const AttentionCall& call) { Attention(call).run(); }

}  // namespace sgl_batch
