#include "experts_int8.h"

#include <algorithm>
#include <vector>

#include "packing_int8.h"
#include "product_int8.h"
#include "routing.h"
#include "rows.h"
#include "rows_int8.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

constexpr int64_t kDownPanelsPerTask = 2;  // whose products of a group wait for their sums in the L2 cache
constexpr int64_t kRowsPerGroup = 4096;  // routed rows whose down products wait for their sums at once

// A panel of an expert's matrix.
struct Place {
  int64_t expert, panel;
};

// A block of one expert's rows: [begin, end) in the routing's order.
struct Block {
  int64_t expert, begin, end;
};

class Int8Experts {
 public:
  explicit Int8Experts(const ExpertsCall& call)
      : c_(call),
        isa_(isa()),
        kernel_(int8_kernel()),
        most_rows_(kTilesPerBlock * kernel_.max_rows),
        routing_(route(call.topk_ids, call.topk_weights, call.tokens, call.top_k, call.experts)) {
    for (int64_t expert = 0; expert < c_.experts; ++expert) {
      const int64_t begin = routing_.offsets[expert], rows = routing_.offsets[expert + 1] - begin;
      c_.rows_per_expert[expert] = rows;
      const int64_t count = divide_up(rows, most_rows_);
      for (int64_t i = 0; i < count; ++i) blocks_.push_back({expert, begin + rows * i / count, begin + rows * (i + 1) / count});
    }
  }

  void run() {
    if (c_.tokens == 0) return;
    plan_tasks();
    lay_out();
    const auto x_bytes = static_cast<int64_t>(size_of(c_.x_dtype));
    round_rows(c_.x, c_.x_dtype, c_.x_stride * x_bytes, c_.tokens, c_.hidden, x_);
    const auto blocks = static_cast<int64_t>(blocks_.size());
    const int64_t up_tasks = blocks * up_chunks_, down_tasks = down_chunks_ * groups_;
    run_tasks_ahead(up_tasks, [this, up_tasks](int64_t task, int64_t next, int thread) {
      const int64_t after = std::min(next, up_tasks - 1);
      const Place place{blocks_[after / up_chunks_].expert, after % up_chunks_ * up_panels_per_task_};
      gate_up(blocks_[task / up_chunks_], task % up_chunks_, place, scratch(thread));
    });
    if (up_chunks_ > 1) run_tasks(blocks, [this](int64_t task, int) { round_block(blocks_[task], between(blocks_[task])); });
    // The chunks of one group come one after the other: its rows stay in the caches.
    run_tasks_ahead(down_tasks, [this, down_tasks](int64_t task, int64_t next, int thread) {
      const Place after{0, std::min(next, down_tasks - 1) % down_chunks_ * down_panels_per_task_};
      down(task % down_chunks_, task / down_chunks_, after, scratch(thread));
    });
  }

 private:
  void plan_tasks() {
    const int64_t wanted = kTasksPerThread * num_threads();
    const int64_t up_panels = divide_up(c_.inter, kPanel), down_panels = divide_up(c_.hidden, kPanel);
    const int64_t blocks = std::max<int64_t>(1, static_cast<int64_t>(blocks_.size()));
    up_panels_per_task_ = divide_up(up_panels, std::clamp<int64_t>(divide_up(wanted, blocks), 1, up_panels));
    up_chunks_ = divide_up(up_panels, up_panels_per_task_);
    tokens_per_group_ = std::min(c_.tokens, std::max<int64_t>(1, kRowsPerGroup / std::max<int64_t>(1, c_.top_k)));
    groups_ = divide_up(c_.tokens, tokens_per_group_);
    down_panels_per_task_ = std::clamp<int64_t>(down_panels * groups_ / wanted, 1, kDownPanelsPerTask);
    down_chunks_ = divide_up(down_panels, down_panels_per_task_);
  }

  void lay_out() {
    const int64_t places = tokens_per_group_ * c_.top_k;
    const auto routed = static_cast<int64_t>(routing_.rows.size());
    between_stride_ = round_up(c_.inter, kPanel);
    Carver one;
    rows_room_ = Int8RowsRoom(one, most_rows_, c_.hidden);
    spare_at_ = one.take(2 * std::max(w13(0, 0).spare_bytes(), w2(0).spare_bytes()));
    slots_at_ = one.take(sizeof(int32_t) * places);
    sum_at_ = one.take(sizeof(float) * kPanel * down_panels_per_task_);
    products_at_ = one.take(sizeof(float) * places * kPanel * down_panels_per_task_);
    between_at_ = one.take(up_chunks_ > 1 ? 0 : sizeof(float) * most_rows_ * between_stride_);
    Carver all;
    const Int8RowsRoom x_room(all, c_.tokens, c_.hidden), inter_room(all, routed, c_.inter);
    const size_t between_at = all.take(up_chunks_ > 1 ? sizeof(float) * routed * between_stride_ : 0);
    scratch_bytes_ = (one.total() + 4095) / 4096 * 4096;
    const size_t scratch_at = all.take(scratch_bytes_ * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(all.total()));
    x_ = x_room.in(base);
    inter_ = inter_room.in(base);
    between_ = reinterpret_cast<float*>(base + between_at);
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
  // other columns, or is rounded at once where these are all. `after`: what this thread needs next.
  void gate_up(const Block& block, int64_t chunk, const Place& after, char* scratch) const {
    const Int8Rows rows = rows_room_.in(scratch);
    gather(block, rows);
    float* to = up_chunks_ > 1 ? between(block) : reinterpret_cast<float*>(scratch + between_at_);
    const int64_t first = chunk * up_panels_per_task_;
    const int64_t last = std::min(first + up_panels_per_task_, divide_up(c_.inter, kPanel));
    {
      const TileUse use(kernel_.release);
      for (int64_t panel = first; panel < last; ++panel) {
        const Place next = panel + 1 < last ? Place{block.expert, panel + 1} : after;
        gate_up_panel(block, panel, next, rows, to + panel * kPanel, scratch);
      }
    }
    if (up_chunks_ == 1) round_block(block, to);
  }

  void gather(const Block& block, const Int8Rows& rows) const {
    for (int64_t row = block.begin; row < block.end; ++row) {
      if (row + 1 < block.end) fetch(x_.row(routing_.rows[row + 1].token), static_cast<size_t>(x_.stride));
      x_.copy(routing_.rows[row].token, rows, row - block.begin);
    }
  }

  // To the first cache: it is read next.
  static void fetch(const void* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 3);
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
    const Tiles tiles(0, block.end - block.begin, kernel_.max_rows);
    alignas(64) float gates[kMaxRows * kPanel], ups[kMaxRows * kPanel];
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t row = tiles.at(tile);
      const int m = tiles.size(tile);
      gate_panel.multiply(rows, row, m, ahead(tiles, tile, gate, next_gate), gates, kPanel);
      up_panel.multiply(rows, row, m, ahead(tiles, tile, up, next_up), ups, kPanel);
      mix(gates, ups, m, to + row * between_stride_);
    }
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
      round_row(from + (row - block.begin) * between_stride_, c_.inter, inter_, row);
  }

  static Ahead ahead(const Tiles& tiles, int64_t tile, const PackedInt8& weight, const uint8_t* next) {
    return tiles.ahead(tile, next, weight.panel_bytes(), quad_steps(weight.k));
  }

  // Some columns of the output for a group of tokens: down products of all experts, then each token's sum.
  void down(int64_t chunk, int64_t group, const Place& after, char* scratch) const {
    const int64_t first = chunk * down_panels_per_task_, begin = group * tokens_per_group_;
    const int64_t end = std::min(c_.tokens, begin + tokens_per_group_);
    const int64_t panels = std::min(down_panels_per_task_, divide_up(c_.hidden, kPanel) - first);
    const int64_t stride = panels * kPanel;
    auto* slots = reinterpret_cast<int32_t*>(scratch + slots_at_);
    auto* products = reinterpret_cast<float*>(scratch + products_at_);
    const TileUse use(kernel_.release);
    int64_t slot = 0;
    for (int64_t expert = 0; expert < c_.experts; ++expert) {
      const auto [from, to] = routing_.rows_of(expert, begin, end);
      if (from == to) continue;
      const Place next = expert + 1 < c_.experts ? Place{expert + 1, first} : after;
      for (int64_t row = from; row < to; ++row)
        slots[routing_.rows[row].place - begin * c_.top_k] = static_cast<int32_t>(slot + row - from);
      down_products(expert, Tiles(from, to, kernel_.max_rows), first, panels, next, products + slot * stride, scratch);
      slot += to - from;
    }
    auto* sum = reinterpret_cast<float*>(scratch + sum_at_);
    const int64_t width = std::min(stride, c_.hidden - first * kPanel);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t place = token * c_.top_k;
      if (token + 1 < end)
        for (int choice = 0; choice < routing_.choices[token + 1]; ++choice)
          fetch(products + slots[place + c_.top_k + choice - begin * c_.top_k] * stride, sizeof(float) * stride);
      weighted_sum(products, stride, slots + place - begin * c_.top_k, routing_.weights.data() + place,
                   routing_.merges.data() + place, routing_.choices[token], stride, sum);
      char* out = static_cast<char*>(c_.out) + (token * c_.hidden + first * kPanel) * size_of(c_.out_dtype);
      write_row(out, c_.out_dtype, sum, width);
    }
  }

  void down_products(int64_t expert, const Tiles& tiles, int64_t first, int64_t panels, const Place& after,
                     float* products, char* scratch) const {
    const PackedInt8 weight = w2(expert);
    auto* spare = reinterpret_cast<uint8_t*>(scratch + spare_at_);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t panel = first + p;
      const float* bias = c_.w2_bias == nullptr ? nullptr : c_.w2_bias + expert * c_.hidden + panel * kPanel;
      const Int8Panel ready(kernel_, weight, panel, bias, spare);
      const uint8_t* next = p + 1 < panels ? weight.panel(panel + 1) : w2(after.expert).panel(after.panel);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t row = tiles.at(tile);
        float* to = products + (row - tiles.begin) * panels * kPanel + p * kPanel;
        ready.multiply(inter_, row, tiles.size(tile), ahead(tiles, tile, weight, next), to, panels * kPanel);
      }
    }
  }

  const ExpertsCall& c_;
  const Isa& isa_;
  const Int8Kernel& kernel_;
  const int64_t most_rows_;  // of a block
  const Routing routing_;
  std::vector<Block> blocks_;
  int64_t up_panels_per_task_ = 1, up_chunks_ = 1, down_panels_per_task_ = 1, down_chunks_ = 1;
  int64_t tokens_per_group_ = 1, groups_ = 1;
  Int8RowsRoom rows_room_;
  size_t spare_at_ = 0, slots_at_ = 0, sum_at_ = 0, products_at_ = 0, between_at_ = 0, scratch_bytes_ = 0;
  int64_t between_stride_ = 0;  // floats
  Int8Rows x_{}, inter_{};      // by token; by expert and then by token
  float* between_ = nullptr;    // of all blocks, where a block's columns lie in several tasks
  char* scratch_ = nullptr;
};

}  // namespace

void run_experts_int8(const ExpertsCall& call) { Int8Experts(call).run(); }

}  // namespace sgl_batch
