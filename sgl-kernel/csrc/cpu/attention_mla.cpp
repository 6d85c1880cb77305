#include "attention_mla.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

constexpr int64_t kRowsPerBlock = 64;   // rows of queries that share a pass over the tokens
constexpr float kLowest = -3.0e38f;     // below any score; infinities would give differences that are no numbers

const MlaKernels& kernels() {
#if defined(__x86_64__)
  const std::string_view name = isa().name;
  if (name == kAvx2.name) return kMlaAvx2;
  if (name == kAvx512Bf16.name) return kMlaAvx512Bf16;
  if (name != kPortable.name) return kMlaAvx512;  // what has AMX, or would have it, multiplies f32 faster than pairs
#endif
  return kMlaPortable;
}

// Tokens [begin, end) of a piece, for heads [head, head + heads).
struct Block {
  int64_t piece, head, heads, begin, end;
};

// Tokens [first, first + count) of a piece: their keys and values in words, and the keys of those that follow, or null.
struct Chunk {
  int64_t first, count;
  const void* keys;
  const void* values;
  const void* next;
};

class Mla {
 public:
  explicit Mla(const MlaCall& call)
      : c_(call),
        k_(kernels()),
        pairs_(call.dtype == DType::kBf16 && k_.interleave != nullptr),
        words_(pairs_ ? call.dim / 2 : call.dim),
        channels_(round_up(call.value_dim, k_.narrow.tile)),
        in_place_(call.page % kMlaChunk == 0 && (pairs_ || (call.dtype == DType::kF32 && channels_ <= call.dim))) {
    const int64_t heads = std::min(c_.heads, kRowsPerBlock), tokens = kRowsPerBlock / heads;
    for (int64_t piece = 0; piece < c_.pieces; ++piece) {
      const int64_t count = c_.starts[piece + 1] - c_.starts[piece];
      for (int64_t head = 0; head < c_.heads; head += heads)
        // Those that see most come first.
        for (int64_t number = divide_up(count, tokens); number-- > 0;) {
          const int64_t token = number * tokens;
          blocks_.push_back({piece, head, std::min(heads, c_.heads - head), token, std::min(count, token + tokens)});
        }
    }
    shares_ = share_blocks(
        blocks_, [this](const Block& block) { return work(block); },
        [this](const Block& block) { return c_.lengths[block.piece]; });
  }

  void run() {
    Carver one;
    const int64_t columns = round_up(kRowsPerBlock, k_.wide.lanes), steps = divide_up(kMlaChunk, pairs_ ? 2 : 1);
    queries_at_ = one.take(static_cast<size_t>(words_ * columns) * 4);
    sums_at_ = one.take(static_cast<size_t>(channels_ * columns) * 4);
    state_at_ = one.take(static_cast<size_t>(2 * columns) * 4);
    scores_at_ = one.take(static_cast<size_t>(kMlaChunk * k_.wide.lanes) * 4);
    keys_at_ = one.take(static_cast<size_t>(kMlaChunk * std::max(words_, channels_)) * 4);
    values_at_ = one.take(pairs_ ? static_cast<size_t>(steps * channels_) * 4 : 0);
    rows_at_ = one.take(static_cast<size_t>(k_.narrow.lanes * std::max(words_, channels_)) * 4);
    const size_t bytes = static_cast<size_t>(round_up(static_cast<int64_t>(one.total()), 4096));
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(bytes * num_threads()));
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(base + bytes * thread);
    run_tasks(shares_, [&](int64_t index, int thread) { attend(blocks_[index], base + bytes * thread); });
  }

 private:
  int64_t work(const Block& block) const { return (block.end - block.begin) * block.heads * seen_by(block, block.end - 1); }

  // How many tokens the given token of a block's piece sees.
  int64_t seen_by(const Block& block, int64_t token) const {
    return c_.lengths[block.piece] - (c_.starts[block.piece + 1] - c_.starts[block.piece]) + token + 1;
  }

  size_t element() const { return size_of(c_.dtype); }
  DType word_dtype() const { return pairs_ ? DType::kBf16 : DType::kF32; }

  const char* token_at(const Block& block, int64_t token) const {
    const int64_t page = c_.tables[c_.table_starts[block.piece] + token / c_.page];
    return static_cast<const char*>(c_.pages) + static_cast<size_t>((page * c_.page + token % c_.page) * c_.dim) * element();
  }

  // Row r of a block is its head r % heads of its token r / heads.
  size_t row_offset(const Block& block, int64_t row, int64_t stride, int64_t width) const {
    const int64_t token = c_.starts[block.piece] + block.begin + row / block.heads;
    return static_cast<size_t>(token * stride + (block.head + row % block.heads) * width) * element();
  }

  void attend(const Block& block, char* scratch) const {
    const int64_t rows = (block.end - block.begin) * block.heads;
    const MlaWidth& width = rows > k_.narrow.lanes ? k_.wide : k_.narrow;
    const int64_t lanes = width.lanes, groups = divide_up(rows, lanes);
    auto* state = reinterpret_cast<float*>(scratch + state_at_);
    std::memset(scratch + sums_at_, 0, static_cast<size_t>(groups * lanes * channels_) * 4);
    for (int64_t i = 0; i < 2 * groups * lanes; ++i) state[i] = i / lanes % 2 == 0 ? kLowest : 0.0f;
    const int64_t tokens = seen_by(block, block.end - 1);
    pack_queries(block, rows, lanes, scratch);
    for (int64_t first = 0; first < tokens; first += kMlaChunk) {
      const Chunk chunk = chunk_of(block, first, std::min<int64_t>(kMlaChunk, tokens - first), scratch);
      for (int64_t group = 0; group < groups; ++group) attend_chunk(block, rows, width, group, chunk, scratch);
    }
    write_out(block, rows, lanes, scratch);
  }

  // Queries by lane: of each group of lanes, word after word. Lanes without a row repeat the last one's.
  void pack_queries(const Block& block, int64_t rows, int64_t lanes, char* scratch) const {
    auto* words = reinterpret_cast<uint32_t*>(scratch + queries_at_);
    for (int64_t first = 0; first < round_up(rows, lanes); first += k_.narrow.lanes) {
      const uint32_t* from[kMlaMaxLanes];
      for (int64_t i = 0; i < k_.narrow.lanes; ++i) {
        const char* row = static_cast<const char*>(c_.q) +
                          row_offset(block, std::min(first + i, rows - 1), c_.q_stride, c_.dim);
        char* widened = scratch + rows_at_ + static_cast<size_t>(i * words_) * 4;
        if (word_dtype() != c_.dtype) read_row(reinterpret_cast<float*>(widened), row, c_.dtype, c_.dim);
        from[i] = reinterpret_cast<const uint32_t*>(word_dtype() != c_.dtype ? widened : row);
      }
      k_.pack(from, words_, words + first / lanes * lanes * words_ + first % lanes, lanes);
    }
  }

  // The words between the beginnings of two tokens of a chunk.
  int64_t stride() const { return in_place_ ? words_ : std::max(words_, channels_); }

  // Tokens as they lie, or a copy of words; a tile may read rubbish past the last one. Values are the keys themselves, or
  // pairs of neighbouring tokens.
  Chunk chunk_of(const Block& block, int64_t first, int64_t count, char* scratch) const {
    Chunk chunk{first, count, token_at(block, first), nullptr, nullptr};
    if (!in_place_) {
      auto* copy = reinterpret_cast<uint32_t*>(scratch + keys_at_);
      for (int64_t t = 0; t < count; ++t)
        convert_row(copy + t * stride(), word_dtype(), token_at(block, first + t), c_.dtype, c_.dim);
      chunk.keys = copy;
    } else if (first + kMlaChunk < c_.lengths[block.piece]) {
      chunk.next = token_at(block, first + kMlaChunk);
    }
    chunk.values = chunk.keys;
    if (pairs_) {
      auto* pairs = reinterpret_cast<uint32_t*>(scratch + values_at_);
      const auto* tokens = static_cast<const uint16_t*>(chunk.keys);
      for (int64_t t = 0; t < count; t += 2)
        k_.interleave(tokens + 2 * t * stride(), t + 1 < count ? tokens + 2 * (t + 1) * stride() : nullptr, c_.value_dim,
                      pairs + t / 2 * channels_);
      chunk.values = pairs;
    }
    return chunk;
  }

  // One group of lanes against one chunk: scores, weights, and what they add to the sums.
  void attend_chunk(const Block& block, int64_t rows, const MlaWidth& width, int64_t group, const Chunk& chunk,
                    char* scratch) const {
    const int64_t lanes = width.lanes;
    auto* scores = reinterpret_cast<float*>(scratch + scores_at_);
    const char* queries = scratch + queries_at_ + static_cast<size_t>(group * lanes * words_) * 4;
    auto* sums = reinterpret_cast<float*>(scratch + sums_at_) + group * lanes * channels_;
    auto* state = reinterpret_cast<float*>(scratch + state_at_) + 2 * group * lanes;
    int32_t seen[kMlaMaxLanes];
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t row = group * lanes + lane;
      const int64_t visible = row < rows ? seen_by(block, block.begin + row / block.heads) - chunk.first : 0;
      seen[lane] = static_cast<int32_t>(std::clamp<int64_t>(visible, 0, chunk.count));
    }
    // The first group brings the next chunk nearer, tile by tile.
    const auto* next = static_cast<const uint32_t*>(group == 0 ? chunk.next : nullptr);
    for (int64_t t = 0; t < chunk.count; t += width.tile)
      (pairs_ ? width.keys_pairs : width.keys_f32)(static_cast<const uint32_t*>(chunk.keys) + t * stride(), stride(), queries,
                                                   words_, nullptr, next == nullptr ? nullptr : next + t * words_,
                                                   scores + t * lanes);
    float kept[kMlaMaxLanes];
    (pairs_ ? width.softmax_pairs : width.softmax_f32)(scores, chunk.count, seen, c_.scaling, state, kept, scores);
    const int64_t steps = pairs_ ? divide_up(chunk.count, 2) : chunk.count, step_words = pairs_ ? channels_ : stride();
    for (int64_t channel = 0; channel < channels_; channel += width.tile)
      (pairs_ ? width.values_pairs : width.values_f32)(static_cast<const uint32_t*>(chunk.values) + channel, step_words, scores,
                                                       steps, kept, nullptr, sums + channel * lanes);
  }

  void write_out(const Block& block, int64_t rows, int64_t lanes, char* scratch) const {
    auto* unpacked = reinterpret_cast<float*>(scratch + rows_at_);
    const auto* sums = reinterpret_cast<const float*>(scratch + sums_at_);
    const auto* state = reinterpret_cast<const float*>(scratch + state_at_);
    for (int64_t first = 0; first < rows; first += k_.narrow.lanes) {
      const int64_t group = first / lanes, lane = first % lanes;
      float factors[kMlaMaxLanes];
      for (int64_t i = 0; i < k_.narrow.lanes; ++i) factors[i] = 1.0f / state[(2 * group + 1) * lanes + lane + i];
      k_.unpack(sums + group * lanes * channels_ + lane, lanes, factors, channels_, unpacked, channels_);
      for (int64_t i = 0; i < std::min<int64_t>(k_.narrow.lanes, rows - first); ++i)
        write_row(static_cast<char*>(c_.out) + row_offset(block, first + i, c_.heads * c_.value_dim, c_.value_dim), c_.dtype,
                  unpacked + i * channels_, c_.value_dim);
    }
  }

  const MlaCall& c_;
  const MlaKernels& k_;
  const bool pairs_;
  const int64_t words_;     // of a row
  const int64_t channels_;  // of a value, rounded up to whole tiles
  const bool in_place_;     // whether a chunk's tokens can be read where they lie
  std::vector<Block> blocks_;
  ShareBounds shares_;
  size_t queries_at_ = 0, sums_at_ = 0, state_at_ = 0, scores_at_ = 0, keys_at_ = 0, values_at_ = 0, rows_at_ = 0;
};

}  // namespace

void run_mla(const MlaCall& call) { Mla(call).run(); }

}  // namespace sgl_batch
