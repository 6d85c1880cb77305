// Owns the checks of how threads share tasks: each is done once, near its neighbours, and nobody waits while some are left.
//
// Prints a line for each rule that does not hold, and ends with 1 if there was one.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "task_shares.h"

namespace {

using namespace sgl_batch;

constexpr int kThreads = 4;
int failures = 0;

void expect(bool holds, const std::string& rule) {
  if (holds) return;
  ++failures;
  std::printf("does not hold: %s\n", rule.c_str());
}

struct Block {
  int64_t piece, work;
};

int64_t work_of(const std::vector<Block>& blocks, int64_t first, int64_t end) {
  int64_t sum = 0;
  for (int64_t at = first; at < end; ++at) sum += blocks[static_cast<size_t>(at)].work;
  return sum;
}

// A bound is within half a block of where shares would be equal, and a share has two bounds.
void check_shares_of_work(std::vector<Block> blocks, const std::vector<int64_t>& lengths, const std::string& name) {
  const std::vector<Block> given = blocks;
  const auto count = static_cast<int64_t>(blocks.size());
  const auto length = [&](const Block& block) { return lengths[static_cast<size_t>(block.piece)]; };
  const ShareBounds bounds = share_blocks(blocks, [](const Block& block) { return block.work; }, length);
  const auto threads = static_cast<int64_t>(bounds.size()) - 1;
  expect(bounds.front() == 0 && bounds.back() == count, name + ": shares are of all blocks");
  expect(threads == std::clamp<int64_t>(count, 1, kThreads), name + ": no more threads than blocks");
  int64_t longest = 0;
  for (const Block& block : blocks) longest = std::max(longest, block.work);
  for (size_t thread = 0; thread + 1 < bounds.size(); ++thread) {
    const int64_t first = bounds[thread], end = bounds[thread + 1], own = work_of(blocks, first, end);
    if (first > end) return expect(false, name + ": bounds ascend");
    expect(own == work_of(given, first, end), name + ": a share keeps its blocks");
    expect(std::llabs(own - work_of(blocks, 0, count) / threads) <= longest + 1, name + ": shares are about equal");
    const auto longer = [&](const Block& a, const Block& b) { return length(a) > length(b); };
    expect(std::is_sorted(blocks.begin() + first, blocks.begin() + end, longer), name + ": a share's long pieces come first");
  }
}

void check_bounds() {
  expect(equal_shares(0) == ShareBounds({0, 0}), "no task: one thread");
  expect(equal_shares(3) == ShareBounds({0, 1, 2, 3}), "no more threads than tasks");
  expect(equal_shares(10) == ShareBounds({0, 2, 5, 7, 10}), "equal shares");
  check_shares_of_work({}, {}, "no block");
  check_shares_of_work({{0, 5}}, {9}, "one block");
  std::vector<Block> alike, uneven, one_long;
  std::vector<int64_t> lengths;
  for (int64_t piece = 0; piece < 50; ++piece) {
    lengths.push_back(piece * 7 % 13);
    for (int64_t block = 5; block > 0; --block) {
      alike.push_back({piece, 3});
      uneven.push_back({piece, lengths.back() * block});
      one_long.push_back({piece, piece == 49 ? 1000 : 1});
    }
  }
  check_shares_of_work(alike, lengths, "like blocks");
  check_shares_of_work(uneven, lengths, "uneven blocks");
  check_shares_of_work(one_long, lengths, "a last piece of most of the work");
}

void check_order() {
  TaskShares shares({0, 2, 4, 9, 9});
  const auto in_turn = [&](int thread, const std::vector<int64_t>& tasks) {
    for (const int64_t task : tasks)
      if (shares.take(thread) != task) return false;
    return true;
  };
  expect(in_turn(0, {0, 1}), "a thread takes its own from the front");
  expect(in_turn(3, {8, 7, 6}), "a thread without any takes from the back of who has most left");
  expect(in_turn(2, {4, 5}), "the others' thread goes on with what is left");
  expect(in_turn(0, {3, 2, 9, 9}), "in the end nothing is left");
  expect(shares.take(1) == 9, "for nobody");
}

void check_each_is_taken_once() {
  constexpr int64_t kTasks = 400'000;
  for (const ShareBounds& bounds : {ShareBounds{0, 100'000, 200'000, 300'000, kTasks}, ShareBounds{0, 0, 0, kTasks, kTasks}}) {
    TaskShares shares(bounds);
    std::vector<std::atomic<int>> taken(kTasks);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&, thread] {
        for (int64_t task = shares.take(thread); task < kTasks; task = shares.take(thread)) ++taken[static_cast<size_t>(task)];
      });
    for (std::thread& thread : threads) thread.join();
    expect(std::all_of(taken.begin(), taken.end(), [](const auto& times) { return times == 1; }), "each task is taken once");
  }
}

void check_runs() {
  for (const int64_t count : {0, 1, 3, 4, 5, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<size_t>(count));
    std::vector<int64_t> promised(kThreads, -1);
    std::atomic<bool> kept{true};
    run_tasks_ahead(count, [&](int64_t task, int64_t next, int thread) {
      int64_t& own = promised[static_cast<size_t>(thread)];
      if (own != -1 && own != task) kept = false;
      own = next;
      ++done[static_cast<size_t>(task)];
    });
    run_tasks(count, [&](int64_t task, int) { ++done[static_cast<size_t>(task)]; });
    expect(kept, "a thread does what it was told comes next");
    expect(std::all_of(done.begin(), done.end(), [](const auto& times) { return times == 2; }), "each task is done once");
  }
}

// A thread that waits in its first task, until all others are done: they are, though most were its own.
void check_others_help() {
  std::atomic<int64_t> others{0};
  bool waited_in_vain = false;
  run_tasks(ShareBounds{0, 100, 101, 102, 103}, [&](int64_t task, int) {
    if (task != 0) {
      ++others;
      return;
    }
    const auto begun = std::chrono::steady_clock::now();
    while (others < 102 && !waited_in_vain) {
      std::this_thread::yield();
      waited_in_vain = std::chrono::steady_clock::now() - begun > std::chrono::seconds(60);
    }
  });
  expect(!waited_in_vain, "others do the tasks of a thread that is busy");
}

}  // namespace

int main() {
  omp_set_dynamic(0);
  omp_set_num_threads(kThreads);
  check_bounds();
  check_order();
  check_each_is_taken_once();
  check_runs();
  check_others_help();
  return failures == 0 ? 0 : 1;
}
