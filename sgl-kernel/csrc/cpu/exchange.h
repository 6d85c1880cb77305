// Owns the exchange of routed rows between ranks of one machine through memory that they share.
//
// Each rank has a region that it alone writes and all read: its tokens, and later its partial sums. So a token is
// written once, whoever wants it, and each rank takes what its experts need. Nobody copies a count or a route: all
// ranks see each other's expert ids.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sgl_batch {

constexpr int kMostRanks = 64;
constexpr int kMostBoardValues = 16;

// What a rank's tokens look like; all ranks must give the same, but for the number of tokens.
struct TokenFormat {
  int64_t tokens, top_k, experts, hidden, element_bytes, dtype;
};

// Begins a region. A phase is published when all that belongs to it is written. What two phases in a row may hold at
// the same time lies twice.
struct RegionHeader {
  alignas(64) std::atomic<uint32_t> exchanged;  // phases published
  alignas(64) std::atomic<uint32_t> posted;     // boards published
  alignas(64) TokenFormat formats[2];
  int64_t starts[kMostRanks];  // where each rank's rows begin among those that this one received
  int64_t boards[2][kMostBoardValues];
};

// Where the parts of a region of `bytes` begin. A region is mapped whole and filled as far as it is used.
struct RegionLayout {
  explicit RegionLayout(size_t bytes);
  size_t x, ids, weights, sums, received, received_ids, received_weights, end;
};

struct Wait {
  int64_t spin_ns;     // looks again and again for so long, then sleeps until it is woken
  int64_t timeout_ns;  // throws std::runtime_error then
};

// One rank's end, for one dispatch, combine or gather. `regions`: those of all ranks, by rank. Phases (and boards,
// apart) are numbered from 1 on every rank alike; tokens have one, and their sums the next.
class Exchange {
 public:
  Exchange(std::vector<char*> regions, size_t region_bytes, int rank, Wait wait);

  // Publishes this rank's tokens (ids in [-1, experts), checked here) and waits for everybody's. Throws
  // std::invalid_argument where the ranks' formats differ, on every rank alike.
  void publish_tokens(const TokenFormat& format, const char* x, size_t x_stride_bytes, const int32_t* ids,
                      const float* weights);

  // How many rows this rank's experts have to compute; to be asked after `publish_tokens`.
  int64_t choose_rows();

  // Copies the chosen rows to where this rank's region has them, by source rank, then by token.
  void take_rows();

  // Where a region has the rows that a rank received: x as it was sent, local ids (-1 for other ranks' experts) and weights
  // (0 for those); and where their sums belong. They stay where they are.
  struct Received {
    char* x;
    int32_t* ids;
    float *weights, *sums;
  };
  Received received() const;

  // Publishes the sums [R, hidden] of the chosen rows, waits for everybody's, and adds up those of this rank's tokens
  // into out [T, hidden] in the order of a binary tree over ranks; absent ranks count as nothing, no rank at all as 0.
  // Sums that lie where they belong are not copied.
  void publish_sums(const float* sums, int64_t count);
  void combine(float* out);

  // Everybody's `count` values, [ranks, count].
  void gather(const int64_t* own, int count, int64_t* all);

  // Gathers matrices of `rows` rows, of which this rank gives columns `own` and rank r has widths[r] bytes in a row, side by
  // side into out. Throws std::invalid_argument where the ranks' rows or widths differ, on every rank alike. Uses the
  // whole region behind its header, in turns with nothing but boards.
  void gather_columns(const char* own, size_t own_stride_bytes, int64_t rows, const std::vector<int64_t>& widths, char* out);

  int64_t waited_ns() const { return waited_ns_; }

 private:
  struct Row {
    int32_t rank, token;
  };

  RegionHeader& header(int rank) const { return *reinterpret_cast<RegionHeader*>(regions_[rank]); }
  const TokenFormat& format(int rank) const { return header(rank).formats[tokens_phase_ % 2]; }
  void await_all(std::atomic<uint32_t> RegionHeader::* word, uint32_t value);
  void check_formats() const;
  void agree_on(const std::vector<int64_t>& described);
  void place_sums(std::vector<int64_t>& places) const;

  std::vector<char*> regions_;
  size_t region_bytes_;
  RegionLayout layout_;
  int rank_;
  Wait wait_;
  uint32_t tokens_phase_;
  int64_t waited_ns_ = 0;
  std::vector<Row> rows_;
};

}  // namespace sgl_batch
