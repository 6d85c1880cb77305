#include "expert_plan.h"

#include "gemm.h"

namespace sgl_batch {

ExpertPlan::ExpertPlan(const ExpertsCall& call, const ExpertCut& cut)
    : tokens_(call.tokens),
      routing_(route(call.topk_ids, call.topk_weights, call.tokens, call.top_k, call.experts)),
      up_panels_(divide_up(call.inter, kPanel)),
      down_panels_(divide_up(call.hidden, kPanel)) {
  for (int64_t expert = 0; expert < call.experts; ++expert) {
    const int64_t begin = routing_.offsets[expert], rows = routing_.offsets[expert + 1] - begin;
    call.rows_per_expert[expert] = rows;
    const int64_t count = divide_up(rows, cut.rows_per_block);
    for (int64_t i = 0; i < count; ++i)
      blocks_.push_back({expert, begin + block_begin(rows, i, count, cut.tiles), begin + block_begin(rows, i + 1, count, cut.tiles)});
  }
  const int64_t wanted = kTasksPerThread * num_threads();
  const int64_t blocks = std::max<int64_t>(1, static_cast<int64_t>(blocks_.size()));
  up_panels_per_task_ = divide_up(up_panels_, std::clamp<int64_t>(divide_up(wanted, blocks), 1, up_panels_));
  up_chunks_ = divide_up(up_panels_, up_panels_per_task_);
  tokens_per_group_ = std::clamp<int64_t>(cut.rows_per_group / std::max<int64_t>(1, call.top_k), 1, std::max<int64_t>(1, tokens_));
  groups_ = divide_up(tokens_, tokens_per_group_);
  // More than the usual ones only where many tasks are left.
  const int64_t usual = std::clamp<int64_t>(down_panels_ * groups_ / wanted, 1, kDownPanelsPerTask);
  down_panels_per_task_ = std::clamp<int64_t>(down_panels_ * groups_ / (2 * wanted), usual, std::max(usual, cut.down_panels));
  if (has_few_rows()) {
    const int64_t piece = kBytesOfFewRows / std::max<int64_t>(1, cut.down_panel_bytes);
    const int64_t most = std::clamp<int64_t>(piece, down_panels_per_task_, kMostDownPanelsPerTask);
    down_panels_per_task_ = std::clamp<int64_t>(down_panels_ * groups_ / (2 * num_threads()), down_panels_per_task_, most);
  }
  down_chunks_ = divide_up(down_panels_, down_panels_per_task_);
  first_rows_.reserve(call.experts * (groups_ + 1));
  for (int64_t expert = 0; expert < call.experts; ++expert)
    for (int64_t group = 0; group <= groups_; ++group)
      first_rows_.push_back(routing_.first_row(expert, std::min(tokens_, group * tokens_per_group_)));
}

}  // namespace sgl_batch
