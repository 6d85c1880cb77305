#include "topk.h"

#include <algorithm>
#include <vector>

#include "tasks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kNumbersPerTask = 4096;

}  // namespace

void run_topk(const TopKCall& c) {
  const ChooseFn choose = isa().choose;
  const int64_t rows = round_up(divide_up(kNumbersPerTask, c.rule.experts), kTopKRows), room = c.rule.experts + kPanel;
  const int64_t scores = room * kTopKRows, keys = scores + room, stride = c.stride * static_cast<int64_t>(size_of(c.dtype));
  std::vector<float> all_scores(static_cast<size_t>(scores * num_threads()));
  std::vector<int32_t> all_keys(static_cast<size_t>(keys * num_threads()));
  run_tasks(divide_up(c.rows, rows), [&](int64_t task, int thread) {
    int32_t* own_keys = all_keys.data() + keys * thread;
    const TopKScratch scratch{all_scores.data() + scores * thread, own_keys, own_keys + scores};
    const int64_t end = std::min(c.rows, (task + 1) * rows);
    for (int64_t r = task * rows; r < end; r += kTopKRows)
      choose(c.rule, {std::min(kTopKRows, end - r), static_cast<const char*>(c.logits) + r * stride, stride, c.dtype,
                      c.weights + r * c.rule.top_k, c.ids + r * c.rule.top_k}, scratch);
  });
}

}  // namespace sgl_batch
