// Owns which tokens a block of attention meets, where their keys and values lie, and how what is read next is brought closer.
#pragma once

#include <algorithm>
#include <utility>

#include "attention.h"
#include "packing.h"
#include "tasks.h"

namespace sgl_batch {

constexpr int64_t kChunk = 128;  // tokens of one step of the softmax

// Tokens [begin, end) of a piece, for KV heads [head, last_head).
struct AttentionBlock {
  int64_t piece, head, last_head, begin, end;
};

// What lies in one page of the tokens that a block meets in one step: `count` of them, from `offset` on.
struct PagePart {
  int64_t page, offset, count;
};

// The tokens, from `first` on, that a block meets in one step.
struct AttentionChunk {
  const AttentionBlock* block = nullptr;
  int64_t first = 0, num_parts = 0;
  PagePart parts[kChunk];
};

// Heads of so few rows in all share a step of the softmax, which takes as long for one row as for a few.
constexpr int64_t kSharedRows = kSoftmaxRoom + 1;

// The sequences of a call, and their pages.
class AttentionPages {
 public:
  explicit AttentionPages(const AttentionCall& call)
      : c_(call),
        group_(call.q_heads / call.kv_heads),
        chunk_(call.page % kChunk == 0 || kChunk % call.page == 0 ? kChunk : call.page),
        part_(std::min(chunk_, call.page)),
        head_bytes_(call.page * call.dim * static_cast<int64_t>(size_of(call.dtype))) {}

  int64_t dim() const { return c_.dim; }
  int64_t page() const { return c_.page; }
  int64_t group() const { return group_; }  // query heads of a KV head
  int64_t chunk() const { return chunk_; }  // tokens of a step of the softmax
  int64_t part() const { return part_; }    // those of them that lie in one page

  // How many tokens the given token of a block's piece sees.
  int64_t seen_by(const AttentionBlock& block, int64_t token) const {
    return c_.lengths[block.piece] - (c_.starts[block.piece + 1] - c_.starts[block.piece]) + token + 1;
  }

  // How many of the first tokens the window hides from a token that sees so many, those included.
  int64_t hidden_from(int64_t sees) const { return c_.window == 0 ? 0 : std::max<int64_t>(0, sees - c_.window); }

  // Where the steps of a block's softmax begin: at the same tokens for every piece of a sequence.
  int64_t first_chunk(const AttentionBlock& block) const {
    return hidden_from(seen_by(block, block.begin)) / chunk_ * chunk_;
  }

  // One head's keys and values of a page.
  PackedWeight keys(int64_t page, int64_t head) const {
    return {at_page(c_.k_pages, page, head), c_.dtype, nullptr, c_.page, c_.dim};
  }
  PackedWeight values(int64_t page, int64_t head) const {
    return {at_page(c_.v_pages, page, head), c_.dtype, nullptr, c_.dim, c_.page};
  }

  // The tokens that a block meets from `first` on. Returns false if there are none.
  bool take(AttentionChunk& chunk, const AttentionBlock& block, int64_t first) const {
    const int64_t tokens = std::min(chunk_, seen_by(block, block.end - 1) - first);
    chunk.block = &block;
    chunk.first = first;
    chunk.num_parts = 0;
    for (int64_t at = 0; at < tokens; at += part_)
      chunk.parts[chunk.num_parts++] = {c_.tables[c_.table_starts[block.piece] + (first + at) / c_.page],
                                        (first + at) % c_.page, std::min(part_, tokens - at)};
    return tokens > 0;
  }

  // How many of a block's heads, from the given one on, share a step of the softmax: all their rows are few.
  int64_t heads_per_step(const AttentionBlock& block, int64_t head) const {
    const int64_t rows = (block.end - block.begin) * group_;
    return std::clamp<int64_t>(kSharedRows / rows, 1, block.last_head - head);
  }

 private:
  const char* at_page(const void* pages, int64_t page, int64_t head) const {
    return static_cast<const char*>(pages) + (page * c_.page_heads + head) * head_bytes_;
  }

  const AttentionCall& c_;
  const int64_t group_, chunk_, part_, head_bytes_;
};

// Goes through the pages in the order in which a thread reads them, kLead bytes ahead of its tiles, so that each of them
// brings closer what is read that much later, and as many bytes as it reads itself. Without that a chunk of few tokens would
// have to bring a whole one.
class alignas(2 * kLineBytes) AttentionLead {
 public:
  explicit AttentionLead(const AttentionPages& pages) : pages_(pages) {}

  // The thread begins one block, and knows which one comes after, or none.
  void enter(const AttentionBlock& block, const AttentionBlock* after) {
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
      if (std::min(static_cast<int64_t>(end_ - at_), owed_) >= most) {
        at_ += most;
        owed_ -= most;
        return {from, kStepBytes};
      }
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

  void begin(const AttentionBlock* block) {
    at_ = end_ = nullptr;
    run_ = 0;
    chunk_.block = block;
    if (block == nullptr) return;
    last_ = block;
    head_ = block->head;
    heads_ = pages_.heads_per_step(*block, head_);
    pages_.take(chunk_, *block, pages_.first_chunk(*block));
  }

  // Goes on to the next bytes that lie together. Returns false once all is read that the thread knows of.
  bool next_run() {
    if (chunk_.block == nullptr) return false;
    const int64_t panels = divide_up(pages_.dim(), kPanel);
    if (run_ == heads_ * chunk_.num_parts * (1 + panels)) {
      run_ = 0;
      head_ += heads_;
      if (head_ == chunk_.block->last_head) {
        head_ = chunk_.block->head;
        if (!pages_.take(chunk_, *chunk_.block, chunk_.first + pages_.chunk())) begin(std::exchange(after_, nullptr));
        if (chunk_.block == nullptr) return false;
      }
      heads_ = pages_.heads_per_step(*chunk_.block, head_);
    }
    if (run_ < heads_ * chunk_.num_parts) {
      const PagePart& part = chunk_.parts[run_ % chunk_.num_parts];
      const PackedWeight keys = pages_.keys(part.page, head_ + run_ / chunk_.num_parts);
      ++run_;
      at_ = keys.panel(part.offset / kPanel);
      end_ = at_ + divide_up(part.count, kPanel) * keys.panel_bytes();
      return true;
    }
    const int64_t number = run_ - heads_ * chunk_.num_parts;
    const PagePart& part = chunk_.parts[number / panels % chunk_.num_parts];
    const PackedWeight values = pages_.values(part.page, head_ + number / panels / chunk_.num_parts);
    at_ = values.panel(number % panels) + tile_steps(values.dtype, part.offset) * kStepBytes;
    end_ = at_ + tile_steps(values.dtype, part.count) * kStepBytes;
    // Panels of a whole page lie one after the other.
    const bool is_whole = part.count == pages_.page();
    if (is_whole) end_ = at_ + panels * values.panel_bytes();
    run_ += is_whole ? panels : 1;
    return true;
  }

  const AttentionPages& pages_;
  const AttentionBlock* after_ = nullptr;
  const AttentionBlock* last_ = nullptr;  // the last one that it has begun
  AttentionChunk chunk_;
  int64_t head_ = 0, heads_ = 1;  // those of a step of the softmax
  int64_t run_ = 0, owed_ = 0;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

}  // namespace sgl_batch
