#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "packing.h"
#include "routing.h"
#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

constexpr int64_t kMostPanelsPerTask = 4;
constexpr size_t kSumBytesPerThread = size_t{32} << 20;


// A block of one expert's rows: [begin, end) in the routing's order.
struct Block {
  int64_t expert, begin, end;
};

class Experts {
 public:
  explicit Experts(const ExpertsCall& call)
      : c_(call),
        isa_(isa()),
        pairs_(isa_.bf16_pairs && call.w_dtype == DType::kBf16),
        tile_(call.w_dtype == DType::kBf16 ? isa_.tile_bf16 : isa_.tile_f32),
        routing_(route(call.topk_ids, call.topk_weights, call.tokens, call.top_k, call.experts)) {
    for (int64_t expert = 0; expert < c_.experts; ++expert) {
      const int64_t begin = routing_.offsets[expert], end = routing_.offsets[expert + 1];
      c_.rows_per_expert[expert] = end - begin;
      for (int64_t row = begin; row < end; row += kTilesPerBlock * isa_.max_rows)
        blocks_.push_back({expert, row, std::min(end, row + kTilesPerBlock * isa_.max_rows)});
    }
  }

  void run() {
    if (c_.tokens == 0) return;
    plan_tasks();
    lay_out();
    run_tasks(static_cast<int64_t>(blocks_.size()) * up_chunks_, [this](int64_t task, int thread) {
      gate_up(blocks_[task / up_chunks_], task % up_chunks_, scratch(thread));
    });
    run_tasks(down_chunks_, [this](int64_t task, int thread) { down(task, scratch(thread)); });
  }

 private:
  void plan_tasks() {
    const int64_t wanted = kTasksPerThread * num_threads();
    const int64_t up_panels = divide_up(c_.inter, kPanel), down_panels = divide_up(c_.hidden, kPanel);
    const int64_t blocks = std::max<int64_t>(1, static_cast<int64_t>(blocks_.size()));
    up_panels_per_task_ = divide_up(up_panels, std::clamp<int64_t>(divide_up(wanted, blocks), 1, up_panels));
    up_chunks_ = divide_up(up_panels, up_panels_per_task_);
    const size_t panel_bytes = static_cast<size_t>(c_.tokens * c_.top_k) * kPanel * 4;
    const int64_t fit = std::max<int64_t>(1, static_cast<int64_t>(kSumBytesPerThread / panel_bytes));
    down_panels_per_task_ = std::clamp<int64_t>(down_panels / wanted, 1, std::min(kMostPanelsPerTask, fit));
    down_chunks_ = divide_up(down_panels, down_panels_per_task_);
  }

  void lay_out() {
    const int64_t longest = std::max(c_.hidden, c_.inter);
    Carver one;
    tiles_at_ = one.take(tile_bytes(c_.hidden, isa_.max_rows, pairs_) * kTilesPerBlock);
    panels_at_ = one.take(size_of(c_.w_dtype) * kPanel * longest * 2);
    results_at_ = one.take(sizeof(float) * kMaxRows * kPanel * 3);
    sums_at_ = one.take(sizeof(float) * c_.tokens * c_.top_k * kPanel * down_panels_per_task_);
    Carver all;
    const size_t inter_at = all.take(static_cast<size_t>(routing_.rows.size()) * c_.inter * (pairs_ ? 2 : 4));
    scratch_bytes_ = (one.total() + 4095) / 4096 * 4096;
    const size_t scratch_at = all.take(scratch_bytes_ * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(all.total()));
    inter_ = base + inter_at;
    scratch_ = base + scratch_at;
  }

  char* scratch(int thread) const { return scratch_ + scratch_bytes_ * thread; }
  char* inter_tile(int64_t row) const { return inter_ + static_cast<size_t>(row) * c_.inter * (pairs_ ? 2 : 4); }
  int rows_of_tile(int64_t row, int64_t end) const {
    return static_cast<int>(std::min<int64_t>(isa_.max_rows, end - row));
  }
  const char* weight(const void* base, int64_t elements) const {
    return static_cast<const char*>(base) + static_cast<size_t>(elements) * size_of(c_.w_dtype);
  }

  // One block's rows through some of an expert's gate and up panels: SiLU(gate) * up, packed for `down`.
  void gate_up(const Block& block, int64_t chunk, char* scratch) const {
    pack_block(block, scratch + tiles_at_);
    const char* gate = weight(c_.w13, block.expert * 2 * c_.inter * c_.hidden);
    const char* up = weight(gate, c_.inter * c_.hidden);
    char* spare = scratch + panels_at_;
    auto* results = reinterpret_cast<float*>(scratch + results_at_);
    const size_t tile_stride = tile_bytes(c_.hidden, isa_.max_rows, pairs_);
    const int64_t last = std::min((chunk + 1) * up_panels_per_task_, divide_up(c_.inter, kPanel));
    for (int64_t panel = chunk * up_panels_per_task_; panel < last; ++panel) {
      const void* gate_panel = full_panel(gate, c_.inter, c_.hidden, panel, c_.w_dtype, spare);
      const void* up_panel =
          full_panel(up, c_.inter, c_.hidden, panel, c_.w_dtype, spare + size_of(c_.w_dtype) * kPanel * c_.hidden);
      const char* tile = scratch + tiles_at_;
      for (int64_t row = block.begin; row < block.end; row += isa_.max_rows, tile += tile_stride) {
        const int m = rows_of_tile(row, block.end);
        float *gates = results, *ups = results + kMaxRows * kPanel, *mixed = ups + kMaxRows * kPanel;
        tile_(tile, gate_panel, c_.hidden, m, gates);
        tile_(tile, up_panel, c_.hidden, m, ups);
        isa_.silu_mul(gates, ups, m * kPanel, mixed);
        store_inter(mixed, m, panel, inter_tile(row));
      }
    }
  }

  void pack_block(const Block& block, char* tiles) const {
    const size_t row_bytes = static_cast<size_t>(c_.x_stride) * size_of(c_.x_dtype);
    for (int64_t row = block.begin; row < block.end; row += isa_.max_rows) {
      const int m = rows_of_tile(row, block.end);
      const void* rows[kMaxRows];
      for (int i = 0; i < m; ++i) rows[i] = static_cast<const char*>(c_.x) + routing_.rows[row + i].token * row_bytes;
      pack_tile(rows, m, c_.hidden, c_.x_dtype, pairs_, tiles);
      tiles += tile_bytes(c_.hidden, isa_.max_rows, pairs_);
    }
  }

  // Columns of one panel into a tile [inter / 2][m][2] of bf16 or [inter][m] of f32.
  void store_inter(const float* mixed, int m, int64_t panel, char* tile) const {
    const int64_t first = panel * kPanel, width = std::min<int64_t>(kPanel, c_.inter - first);
    for (int i = 0; i < m; ++i) {
      const float* from = mixed + i * kPanel;
      if (pairs_) {
        auto* to = reinterpret_cast<uint32_t*>(tile) + first / 2 * m + i;
        for (int64_t j = 0; j < width / 2; ++j)
          to[j * m] = f32_to_bf16(from[2 * j]) | static_cast<uint32_t>(f32_to_bf16(from[2 * j + 1])) << 16;
      } else {
        auto* to = reinterpret_cast<float*>(tile) + first * m + i;
        for (int64_t j = 0; j < width; ++j) to[j * m] = from[j];
      }
    }
  }

  // Some columns of the output for every token: down products of all experts, then each token's sum.
  void down(int64_t chunk, char* scratch) const {
    const int64_t first = chunk * down_panels_per_task_;
    const int64_t panels = std::min(down_panels_per_task_, divide_up(c_.hidden, kPanel) - first);
    const int64_t stride = down_panels_per_task_ * kPanel;
    auto* sums = reinterpret_cast<float*>(scratch + sums_at_);
    auto* result = reinterpret_cast<float*>(scratch + results_at_);
    for (const Block& block : blocks_) {
      const char* matrix = weight(c_.w2, block.expert * c_.hidden * c_.inter);
      for (int64_t p = 0; p < panels; ++p) {
        const void* panel = full_panel(matrix, c_.hidden, c_.inter, first + p, c_.w_dtype, scratch + panels_at_);
        for (int64_t row = block.begin; row < block.end; row += isa_.max_rows) {
          const int m = rows_of_tile(row, block.end);
          tile_(inter_tile(row), panel, c_.inter, m, result);
          for (int i = 0; i < m; ++i) {
            const RoutedRow& routed = routing_.rows[row + i];
            scale_row(sums + routed.place * stride + p * kPanel, result + i * kPanel, routed.weight, kPanel);
          }
        }
      }
    }
    const int64_t width = std::min(panels * kPanel, c_.hidden - first * kPanel);
    for (int64_t token = 0; token < c_.tokens; ++token) write_sum(token, sums, stride, first * kPanel, width);
  }

  void write_sum(int64_t token, float* sums, int64_t stride, int64_t column, int64_t width) const {
    float* rows = sums + token * c_.top_k * stride;
    if (routing_.choices[token] == 0) std::memset(rows, 0, static_cast<size_t>(width) * 4);
    tree_sum(rows, stride, width, routing_.choices[token], routing_.merges.data() + token * c_.top_k);
    char* out = static_cast<char*>(c_.out) + (token * c_.hidden + column) * size_of(c_.out_dtype);
    write_row(out, c_.out_dtype, rows, width);
  }

  const ExpertsCall& c_;
  const Isa& isa_;
  const bool pairs_;
  const TileFn tile_;
  const Routing routing_;
  std::vector<Block> blocks_;
  int64_t up_panels_per_task_ = 1, up_chunks_ = 1, down_panels_per_task_ = 1, down_chunks_ = 1;
  size_t tiles_at_ = 0, panels_at_ = 0, results_at_ = 0, sums_at_ = 0, scratch_bytes_ = 0;
  char* inter_ = nullptr;
  char* scratch_ = nullptr;
};

}  // namespace

void run_experts(const ExpertsCall& call) { Experts(call).run(); }

}  // namespace sgl_batch
