// Owns how expert compute over a combined batch is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "experts.h"
#include "routing.h"
#include "tasks.h"
#include "token_sums.h"

namespace sgl_batch {

// How many panels a down task has: a row is read from afar once for all of them. With many rows the products of kernels that take
// rows by blocks are so quick that it pays to read rows and weights more rarely, though open sums leave the L2 cache for that.
constexpr int64_t kDownPanelsPerTask = 2;
constexpr int64_t kDownPanelsOfBlocks = 4;

// With few rows memory is what takes time, which is slow to begin: then an expert's panels are read in pieces of so many bytes.
constexpr int64_t kBytesOfFewRows = 96 << 10;
constexpr int64_t kMostDownPanelsPerTask = 8;
constexpr int64_t kFewRowsOfExpert = 8;  // on average
constexpr int64_t kExpertsPerThread = 8;

// Routed rows of a group for each MiB of the second cache; of rows by blocks it may leave the cache, see above.
constexpr int64_t kGroupRowsPerMiB = 4096;
constexpr int64_t kGroupRowsOfBlocks = 16384;

// How large the parts are that work is cut into.
struct ExpertCut {
  const TileCut& tiles;    // of the kernel that runs
  int64_t rows_per_block;  // of one expert, a multiple of tiles.block_unit()
  int64_t rows_per_group;  // routed rows of a group: its tokens' open sums stay in the L2 cache
  int64_t down_panel_bytes;
  int64_t down_panels = kDownPanelsPerTask;
};

// A panel of an expert's matrix.
struct Place {
  int64_t expert, panel;
};

// A block of one expert's rows: [begin, end) in the routing's order.
struct Block {
  int64_t expert, begin, end;
};

// Gate and up panels [first, last) for one block.
struct UpTask {
  Block block;
  int64_t first, last;
};

// Down panels [first, last) for the tokens [begin, end) of one group.
struct DownTask {
  int64_t group, begin, end, first, last;
};

class ExpertPlan {
 public:
  // Writes the call's rows_per_expert.
  ExpertPlan(const ExpertsCall& call, const ExpertCut& cut);

  const Routing& routing() const { return routing_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  int64_t tokens_per_group() const { return tokens_per_group_; }
  int64_t down_panels_per_task() const { return down_panels_per_task_; }
  // So few rows an expert, of so many experts, that a thread does best to go through all of an expert's panels.
  bool goes_by_experts() const {
    return has_few_rows() && static_cast<int64_t>(blocks_.size()) >= kExpertsPerThread * num_threads();
  }
  // A block's panels are one task's.
  bool whole_blocks() const { return up_chunks_ == 1; }

  int64_t up_tasks() const { return static_cast<int64_t>(blocks_.size()) * up_chunks_; }
  UpTask up(int64_t task) const {
    const int64_t first = task % up_chunks_ * up_panels_per_task_;
    return {blocks_[task / up_chunks_], first, std::min(first + up_panels_per_task_, up_panels_)};
  }

  // The tasks of one group come one after the other: its rows stay in the caches.
  int64_t down_tasks() const { return down_chunks_ * groups_; }
  DownTask down(int64_t task) const {
    const int64_t group = task / down_chunks_, begin = group * tokens_per_group_;
    const int64_t first = task % down_chunks_ * down_panels_per_task_;
    return {group, begin, std::min(tokens_, begin + tokens_per_group_), first, std::min(first + down_panels_per_task_, down_panels_)};
  }

  // An expert's first routed row in a group, or in one that follows; what ends the last group ends the expert's rows.
  int64_t first_row(int64_t expert, int64_t group) const { return first_rows_[expert * (groups_ + 1) + group]; }

 private:
  bool has_few_rows() const { return routing_.rows.size() <= kFewRowsOfExpert * blocks_.size(); }

  const int64_t tokens_;
  const Routing routing_;
  const int64_t up_panels_, down_panels_;
  std::vector<Block> blocks_;
  std::vector<int64_t> first_rows_;  // [experts][groups + 1]
  int64_t up_panels_per_task_, up_chunks_, down_panels_per_task_, down_chunks_, tokens_per_group_, groups_;
};

// Some columns of the output for a group of tokens: the down products of all experts, added up by token. Called for each
// expert that has rows in the group is add(expert, first row, last row, next, sums); `next` is what the thread needs after
// that, in the end `after`. `room`: see TokenSums.
template <typename Add>
void sum_down_products(const ExpertsCall& call, const ExpertPlan& plan, const DownTask& task, const Place& after, void* room,
                       const Add& add) {
  const int64_t columns = (task.last - task.first) * kPanel;
  TokenSums sums(plan.routing(), task.begin, task.end, columns, room);
  for (int64_t expert = 0; expert < call.experts; ++expert) {
    const int64_t from = plan.first_row(expert, task.group), to = plan.first_row(expert, task.group + 1);
    if (from < to) add(expert, from, to, expert + 1 < call.experts ? Place{expert + 1, task.first} : after, sums);
  }
  const auto element = static_cast<int64_t>(size_of(call.out_dtype));
  sums.write(static_cast<char*>(call.out) + (task.begin * call.hidden + task.first * kPanel) * element, call.hidden * element,
             call.out_dtype, std::min(columns, call.hidden - task.first * kPanel));
}

// Where a thread goes through all of an expert: the outputs of the tokens [begin, end), of the products of all routed rows, which
// begin `stride` floats apart, whole panels. `room`: see TokenSums.
inline void sum_whole_products(const ExpertsCall& call, const Routing& routing, int64_t begin, int64_t end, const float* products,
                               int64_t stride, void* room) {
  TokenSums sums(routing, begin, end, stride, room);
  for (int64_t expert = 0; expert < call.experts; ++expert) {
    const int64_t from = routing.first_row(expert, begin), to = routing.first_row(expert, end);
    if (from < to) sums.add(from, static_cast<int>(to - from), products + from * stride);
  }
  const int64_t bytes = call.hidden * static_cast<int64_t>(size_of(call.out_dtype));
  sums.write(static_cast<char*>(call.out) + begin * bytes, bytes, call.out_dtype, call.hidden);
}

// Calls sum(begin, end, thread) for all tokens, as many at a time as `most_tokens_of_sum` says.
inline int64_t most_tokens_of_sum(int64_t tokens) { return divide_up(tokens, std::min(tokens, kTasksPerThread * num_threads())); }
template <typename Sum>
void run_token_sums(int64_t tokens, const Sum& sum) {
  const int64_t most = most_tokens_of_sum(tokens);
  run_tasks(divide_up(tokens, most),
            [&](int64_t task, int thread) { sum(task * most, std::min(tokens, (task + 1) * most), thread); });
}

}  // namespace sgl_batch
