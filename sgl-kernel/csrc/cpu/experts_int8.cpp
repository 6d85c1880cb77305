#include "experts_int8.h"

#include <algorithm>
#include <array>
#include <optional>

#include "expert_plan.h"
#include "packing_int8.h"
#include "product_int8.h"
#include "rows.h"
#include "rows_int8.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

class Int8Experts {
 public:
  explicit Int8Experts(const ExpertsCall& call)
      : c_(call),
        isa_(isa()),
        kernel_(int8_kernel()),
        most_rows_(rows_per_block(kernel_.cut, call.hidden)),
        plan_(call, cut()),
        rows_(plan_.routing().rows.data()),
        by_experts_(!kernel_.cut.row_blocks && plan_.goes_by_experts()) {}

  void run() {
    if (c_.tokens == 0) return;
    lay_out();
    const auto x_bytes = static_cast<int64_t>(size_of(c_.x_dtype));
    round_rows(c_.x, c_.x_dtype, c_.x_stride * x_bytes, c_.tokens, x_);
    if (by_experts_) return run_by_experts();
    const int64_t up_tasks = plan_.up_tasks(), down_tasks = plan_.down_tasks();
    run_tasks_ahead(up_tasks, [this, up_tasks](int64_t task, int64_t next, int thread) {
      gate_up(plan_.up(task), plan_.up(std::min(next, up_tasks - 1)), scratch(thread));
    });
    if (!plan_.whole_blocks())
      run_tasks(static_cast<int64_t>(plan_.blocks().size()), [this](int64_t task, int) {
        const Block& block = plan_.blocks()[task];
        round_block(block, between(block));
      });
    run_tasks_ahead(down_tasks, [this, down_tasks](int64_t task, int64_t next, int thread) {
      down(plan_.down(task), {0, plan_.down(std::min(next, down_tasks - 1)).first}, scratch(thread));
    });
  }

 private:
  // Few rows: a thread goes through all of an expert's matrices, each in one piece, and what it gives is added up in the end.
  void run_by_experts() {
    run_tasks(static_cast<int64_t>(plan_.blocks().size()),
              [this](int64_t task, int thread) { whole_expert(plan_.blocks()[task], scratch(thread)); });
    run_token_sums(c_.tokens, [this](int64_t begin, int64_t end, int thread) {
      sum_whole_products(c_, plan_.routing(), begin, end, products_, out_stride_, scratch(thread) + sums_at_);
    });
  }

  ExpertCut cut() const {
    const int64_t panel_bytes = kPanel * c_.inter;
    if (!kernel_.cut.row_blocks)
      return {.tiles = kernel_.cut, .rows_per_block = most_rows_, .rows_per_group = kGroupRowsPerMiB, .down_panel_bytes = panel_bytes};
    return {.tiles = kernel_.cut, .rows_per_block = most_rows_, .rows_per_group = kGroupRowsOfBlocks, .down_panel_bytes = panel_bytes,
            .down_panels = kDownPanelsOfBlocks};
  }

  void lay_out() {
    const auto routed = static_cast<int64_t>(plan_.routing().rows.size());
    const bool whole = plan_.whole_blocks();
    between_stride_ = round_up(c_.inter, kPanel);
    Carver one;
    const bool by_blocks = kernel_.cut.row_blocks;
    rows_room_ = Int8RowsRoom(one, most_rows_, c_.hidden, by_blocks);
    spare_at_ = one.take(std::max(2 * w13(0, 0).spare_bytes(), plan_.down_panels_per_task() * w2(0).spare_bytes()));
    const int64_t up_sums = 2 * (c_.hidden > kernel_.cut.best_k ? most_rows_ : 0);
    const int64_t down_sums = plan_.down_panels_per_task() * (c_.inter > kernel_.cut.best_k ? kernel_.cut.max_rows : 0);
    parts_at_ = one.take(sizeof(int32_t) * kPanel * static_cast<size_t>(std::max(up_sums, down_sums)));
    out_stride_ = round_up(c_.hidden, kPanel);
    sums_at_ = one.take(by_experts_ ? TokenSums::room_bytes(plan_.routing(), most_tokens_of_sum(c_.tokens), out_stride_)
                                    : TokenSums::room_bytes(plan_.routing(), plan_.tokens_per_group(),
                                                            kPanel * plan_.down_panels_per_task()));
    const size_t block_bytes = sizeof(float) * static_cast<size_t>(most_rows_ * between_stride_);
    between_at_ = one.take(whole || by_experts_ ? block_bytes : 0);
    gates_at_ = one.take(by_experts_ ? block_bytes : 0);
    Carver all;
    const Int8RowsRoom x_room(all, c_.tokens, c_.hidden, false), inter_room(all, routed, c_.inter, by_blocks);
    const size_t between_at = all.take(whole || by_experts_ ? 0 : sizeof(float) * routed * between_stride_);
    const size_t products_at = all.take(by_experts_ ? sizeof(float) * routed * out_stride_ : 0);
    scratch_bytes_ = (one.total() + 4095) / 4096 * 4096;
    const size_t scratch_at = all.take(scratch_bytes_ * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(all.total()));
    x_ = x_room.in(base);
    inter_ = inter_room.in(base);
    between_ = reinterpret_cast<float*>(base + between_at);
    products_ = reinterpret_cast<float*>(base + products_at);
    scratch_ = base + scratch_at;
    all.guard(base);
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(scratch(thread));
  }

  char* scratch(int thread) const { return scratch_ + scratch_bytes_ * thread; }
  float* between(const Block& block) const { return between_ + block.begin * between_stride_; }

  // The gate matrix of an expert (half 0) or its up matrix (half 1).
  PackedInt8 w13(int64_t expert, int64_t half) const {
    return part(c_.w13, c_.w13_scales, 2 * expert + half, c_.inter, c_.hidden);
  }
  PackedInt8 w2(int64_t expert) const { return part(c_.w2, c_.w2_scales, expert, c_.hidden, c_.inter); }
  static PackedInt8 part(const void* base, const float* scales, int64_t index, int64_t n, int64_t k) {
    return {static_cast<const uint8_t*>(base) + index * n * k, scales + index * n, n, k};
  }

  // One block's rows through some of an expert's gate and up panels: SiLU(gate) * up in f32, which lies with the block's
  // other columns, or is rounded at once where these are all. `after`: what this thread does next.
  void gate_up(const UpTask& task, const UpTask& after, char* scratch) const {
    const Block& block = task.block;
    Int8Rows rows = rows_room_.in(scratch);
    if (rows.layout.by_blocks()) rows.layout = RowLayout::blocks(block.end - block.begin);
    gather(block, rows);
    const bool whole = plan_.whole_blocks();
    float* to = whole ? reinterpret_cast<float*>(scratch + between_at_) : between(block);
    {
      const TileUse use(kernel_.release);
      for (int64_t panel = task.first; panel < task.last; ++panel) {
        const Place next = panel + 1 < task.last ? Place{block.expert, panel + 1} : Place{after.block.expert, after.first};
        gate_up_panel(block, panel, next, rows, to + panel * kPanel, scratch);
      }
    }
    if (whole) round_block(block, to);
  }

  void whole_expert(const Block& block, char* scratch) const {
    const Int8Rows rows = rows_room_.in(scratch);
    gather(block, rows);
    auto* gates = reinterpret_cast<float*>(scratch + gates_at_);
    auto* between = reinterpret_cast<float*>(scratch + between_at_);
    const TileUse use(kernel_.release);
    const Tiles tiles(0, block.end - block.begin, kernel_.cut);
    const PackedInt8 gate = w13(block.expert, 0), up = w13(block.expert, 1), down = w2(block.expert);
    // A tile's gates of one panel follow another; so do those of the next one.
    const auto gates_of = [&](int64_t panel, int64_t tile) { return gates + (panel * tiles.rows + tiles.at(tile)) * kPanel; };
    each_tile(gate, c_.w13_bias, 2 * block.expert, up.panel(0), rows, tiles, scratch,
              [&](int64_t panel, int64_t tile, const auto& multiply) { multiply(gates_of(panel, tile), kPanel); });
    alignas(64) float ups[kMaxRows * kPanel];
    each_tile(up, c_.w13_bias, 2 * block.expert + 1, down.panel(0), rows, tiles, scratch,
              [&](int64_t panel, int64_t tile, const auto& multiply) {
                multiply(ups, kPanel);
                mix(gates_of(panel, tile), ups, tiles.size(tile), between + tiles.at(tile) * between_stride_ + panel * kPanel);
              });
    round_block(block, between);
    const Tiles routed(block.begin, block.end, kernel_.cut);
    each_tile(down, c_.w2_bias, block.expert, down.panel(0), inter_, routed, scratch,
              [&](int64_t panel, int64_t tile, const auto& multiply) {
                multiply(products_ + routed.at(tile) * out_stride_ + panel * kPanel, out_stride_);
              });
  }

  // All panels of a matrix, the given one of those that have biases, with all tiles each: calls each(panel, tile, multiply), which
  // calls multiply(to, stride). `after`: what is read next.
  template <typename Each>
  void each_tile(const PackedInt8& weight, const float* biases, int64_t index, const uint8_t* after, const Int8Rows& rows,
                 const Tiles& tiles, char* scratch, const Each& each) const {
    auto* spare = reinterpret_cast<uint8_t*>(scratch + spare_at_);
    for (int64_t panel = 0; panel < weight.panels(); ++panel) {
      const Int8Panel ready(kernel_, weight, panel, biases == nullptr ? nullptr : biases + index * weight.n + panel * kPanel, spare);
      const uint8_t* next = panel + 1 < weight.panels() ? weight.panel(panel + 1) : after;
      for (int64_t tile = 0; tile < tiles.count; ++tile)
        each(panel, tile, [&](float* to, int64_t stride) { ready.multiply(rows, {tiles, tile, next}, to, stride); });
    }
  }

  void gather(const Block& block, const Int8Rows& rows) const {
    for (int64_t row = block.begin; row < block.end; ++row) {
      if (row + 1 < block.end) fetch(x_.at(rows_[row + 1].token), static_cast<size_t>(x_.layout.row));
      x_.copy(rows_[row].token, rows, row - block.begin);
    }
  }

  void gate_up_panel(const Block& block, int64_t panel, const Place& next, const Int8Rows& rows, float* to,
                     char* scratch) const {
    const PackedInt8 gate = w13(block.expert, 0), up = w13(block.expert, 1);
    auto* spare = reinterpret_cast<uint8_t*>(scratch + spare_at_);
    const float* gate_bias = c_.w13_bias == nullptr ? nullptr : c_.w13_bias + 2 * block.expert * c_.inter + panel * kPanel;
    const float* up_bias = gate_bias == nullptr ? nullptr : gate_bias + c_.inter;
    const Int8Panel gate_panel(kernel_, gate, panel, gate_bias, spare);
    const Int8Panel up_panel(kernel_, up, panel, up_bias, spare + gate.spare_bytes());
    const uint8_t* next_gate = w13(next.expert, 0).panel(next.panel);
    const uint8_t* next_up = w13(next.expert, 1).panel(next.panel);
    const Tiles tiles(0, block.end - block.begin, kernel_.cut);
    const bool rows_pass = tiles.rows_pass(kernel_.cut);
    const KParts parts = tiles.parts(c_.hidden, kernel_.cut, kRowBytes, rows_pass);
    auto* gate_sums = reinterpret_cast<int32_t*>(scratch + parts_at_);
    int32_t* up_sums = gate_sums + tiles.rows * kPanel;
    // Part by part, one of the two panels at a time stays in the first cache.
    if (parts.count > 1)
      for (int64_t part = 0; part < parts.count; ++part) {
        add_part(rows, tiles, parts, part, gate_panel, next_gate, rows_pass, gate_sums);
        add_part(rows, tiles, parts, part, up_panel, next_up, rows_pass, up_sums);
      }
    alignas(64) float gates[kMaxRows * kPanel], ups[kMaxRows * kPanel];
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const Int8TileOf gate_tile{.tiles = tiles, .tile = tile, .next_panel = next_gate, .rows_pass = rows_pass};
      const Int8TileOf up_tile{.tiles = tiles, .tile = tile, .next_panel = next_up, .rows_pass = rows_pass};
      const int64_t row = tiles.at(tile);
      if (parts.count > 1) {
        gate_panel.finish(rows, gate_tile, gate_sums + row * kPanel, gates, kPanel);
        up_panel.finish(rows, up_tile, up_sums + row * kPanel, ups, kPanel);
      } else {
        gate_panel.multiply(rows, gate_tile, gates, kPanel);
        up_panel.multiply(rows, up_tile, ups, kPanel);
      }
      mix(gates, ups, tiles.size(tile), to + row * between_stride_);
    }
  }

  // A part of k of all tiles.
  static void add_part(const Int8Rows& rows, const Tiles& tiles, const KParts& parts, int64_t part, const Int8Panel& panel,
                       const uint8_t* next, bool rows_pass, int32_t* sums) {
    for (int64_t tile = 0; tile < tiles.count; ++tile)
      panel.add_up(rows, {.tiles = tiles, .tile = tile, .next_panel = next, .rows_pass = rows_pass}, parts.at(part), parts.length(part),
                   sums + tiles.at(tile) * kPanel);
  }

  void mix(const float* gates, const float* ups, int m, float* to) const {
    const int64_t stride = between_stride_ * static_cast<int64_t>(sizeof(float));
    if (c_.clamped)
      isa_.clamped_mul(gates, ups, m, c_.alpha, c_.limit, DType::kF32, to, stride);
    else
      isa_.silu_mul(gates, ups, m, DType::kF32, to, stride);
  }

  void round_block(const Block& block, const float* from) const {
    for (int64_t row = block.begin; row < block.end; ++row)
      round_row(from + (row - block.begin) * between_stride_, inter_, row);
  }

  // `after`: what this thread needs next.
  void down(const DownTask& task, const Place& after, char* scratch) const {
    const TileUse use(kernel_.release);
    sum_down_products(c_, plan_, task, after, scratch + sums_at_,
                      [&](int64_t expert, int64_t from, int64_t to, const Place& next, TokenSums& sums) {
                        down_products(expert, Tiles(from, to, kernel_.cut), task, next, sums, scratch);
                      });
  }

  void down_products(int64_t expert, const Tiles& tiles, const DownTask& task, const Place& after, TokenSums& sums,
                     char* scratch) const {
    const PackedInt8 weight = w2(expert), later = w2(after.expert);
    const int64_t panels = task.last - task.first, stride = panels * kPanel;
    const KParts parts = tiles.parts(c_.inter, kernel_.cut, kRowBytes);
    auto* part_sums = reinterpret_cast<int32_t*>(scratch + parts_at_);
    alignas(64) float products[kMaxRows * kPanel * kMostDownPanelsPerTask];
    std::array<std::optional<Int8Panel>, kMostDownPanelsPerTask> ready;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t panel = task.first + p;
      const float* bias = c_.w2_bias == nullptr ? nullptr : c_.w2_bias + expert * c_.hidden + panel * kPanel;
      ready[p].emplace(kernel_, weight, panel, bias, reinterpret_cast<uint8_t*>(scratch + spare_at_ + p * weight.spare_bytes()));
    }
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int m = tiles.size(tile);
      const auto of = [&](int64_t p) {
        Int8TileOf own{tiles, tile, later.panel(std::min(after.panel + p, later.panels() - 1))};
        if (inter_.layout.by_blocks()) bring_inter_rows(own, plan_.first_row(after.expert, task.group), p, panels);
        return own;
      };
      for (int64_t part = 0; parts.count > 1 && part < parts.count; ++part)
        for (int64_t p = 0; p < panels; ++p)
          ready[p]->add_up(inter_, of(p), parts.at(part), parts.length(part), part_sums + p * m * kPanel);
      for (int64_t p = 0; p < panels; ++p) {
        if (parts.count > 1)
          ready[p]->finish(inter_, of(p), part_sums + p * m * kPanel, products + p * kPanel, stride);
        else
          ready[p]->multiply(inter_, of(p), products + p * kPanel, stride);
      }
      sums.add(tiles.at(tile), m, products);
    }
  }

  // The rows of the next tile, or those from `later` on: each of `panels` tiles brings its share of them.
  void bring_inter_rows(Int8TileOf& of, int64_t later, int64_t share, int64_t panels) const {
    const bool last = of.tile + 1 == of.tiles.count;
    const int64_t count = last ? kernel_.cut.usual_rows() : of.tiles.size(of.tile + 1);
    of.count = divide_up(count, panels);
    of.next_rows = inter_.at((last ? later : of.tiles.at(of.tile + 1)) + std::min(share * of.count, count));
  }

  const ExpertsCall& c_;
  const Isa& isa_;
  const Int8Kernel& kernel_;
  const int64_t most_rows_;  // of a block
  const ExpertPlan plan_;
  const RoutedRow* const rows_;
  Int8RowsRoom rows_room_;
  size_t spare_at_ = 0, parts_at_ = 0, sums_at_ = 0, between_at_ = 0, scratch_bytes_ = 0;
  int64_t between_stride_ = 0;  // floats
  Int8Rows x_{}, inter_{};      // by token; by expert and then by token
  const bool by_experts_;
  size_t gates_at_ = 0;
  int64_t out_stride_ = 0;      // floats
  float* products_ = nullptr;   // of all routed rows, by expert
  float* between_ = nullptr;    // of all blocks, where a block's columns lie in several tasks
  char* scratch_ = nullptr;
};

}  // namespace

void run_experts_int8(const ExpertsCall& call) { Int8Experts(call).run(); }

}  // namespace sgl_batch
