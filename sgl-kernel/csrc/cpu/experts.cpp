#include "experts.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "packing.h"
#include "routing.h"
#include "rows.h"
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

class Experts {
 public:
  explicit Experts(const ExpertsCall& call)
      : c_(call),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(call.w_dtype)),
        tile_(isa_.tile(call.w_dtype)),
        routing_(route(call.topk_ids, call.topk_weights, call.tokens, call.top_k, call.experts)) {
    const int64_t most = kTilesPerBlock * tile_.max_rows;
    for (int64_t expert = 0; expert < c_.experts; ++expert) {
      const int64_t begin = routing_.offsets[expert], rows = routing_.offsets[expert + 1] - begin;
      c_.rows_per_expert[expert] = rows;
      if (rows > 0 && c_.slots != nullptr && c_.slots[expert] < 0)
        throw std::invalid_argument("expert " + std::to_string(expert) + " has " + std::to_string(rows) + " rows and no slot");
      const int64_t count = divide_up(rows, most);
      for (int64_t i = 0; i < count; ++i) blocks_.push_back({expert, begin + rows * i / count, begin + rows * (i + 1) / count});
    }
  }

  void run() {
    if (c_.tokens == 0) return;
    plan_tasks();
    lay_out();
    if (c_.part != ExpertsPart::kDown) {
      const auto tasks = static_cast<int64_t>(blocks_.size()) * up_chunks_;
      run_tasks_ahead(tasks, [this, tasks](int64_t task, int64_t next, int thread) {
        const int64_t after = std::min(next, tasks - 1);
        gate_up(blocks_[task / up_chunks_], task % up_chunks_, {blocks_[after / up_chunks_].expert, after % up_chunks_ * up_panels_per_task_},
                scratch(thread));
      });
    }
    if (c_.part == ExpertsPart::kUp) return;
    // The chunks of one group come one after the other: its rows stay in the caches.
    const int64_t tasks = down_chunks_ * groups_;
    run_tasks_ahead(tasks, [this, tasks](int64_t task, int64_t next, int thread) {
      const int64_t after = std::min(next, tasks - 1);
      down(task % down_chunks_, task / down_chunks_, {0, after % down_chunks_ * down_panels_per_task_}, scratch(thread));
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
    Carver one;
    rows_at_ = one.take(row_bytes(c_.hidden) * kTilesPerBlock * tile_.max_rows);
    panels_at_ = one.take(2 * std::max(w13(0, 0).spare_bytes(), w2(0).spare_bytes()));
    gates_at_ = one.take(sizeof(float) * tile_.max_rows * kPanel * 2);
    slots_at_ = one.take(sizeof(int32_t) * places);
    sum_at_ = one.take(sizeof(float) * kPanel * down_panels_per_task_);
    products_at_ = one.take(sizeof(float) * places * kPanel * down_panels_per_task_);
    Carver all;
    // Panels are stored whole, so that a row has room for its last one.
    const bool whole = c_.part == ExpertsPart::kBoth;
    inter_stride_ = whole ? row_bytes(round_up(c_.inter, kPanel)) : static_cast<size_t>(c_.between_stride);
    const size_t inter_at = all.take(whole ? routing_.rows.size() * inter_stride_ : 0);
    scratch_bytes_ = (one.total() + 4095) / 4096 * 4096;
    const size_t scratch_at = all.take(scratch_bytes_ * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(all.total()));
    inter_ = whole ? base + inter_at : static_cast<char*>(c_.between);
    scratch_ = base + scratch_at;
    all.guard(base);
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(scratch(thread));
  }

  char* scratch(int thread) const { return scratch_ + scratch_bytes_ * thread; }
  size_t row_bytes(int64_t count) const { return static_cast<size_t>(count) * size_of(row_dtype_); }
  char* inter_row(int64_t row) const { return inter_ + static_cast<size_t>(row) * inter_stride_; }

  // Of an expert that is not there any slot: it is looked ahead to, never computed with.
  int64_t slot(int64_t expert) const { return c_.slots == nullptr ? expert : std::max(0, c_.slots[expert]); }

  // The gate matrix of an expert (half 0) or its up matrix (half 1).
  PackedWeight w13(int64_t expert, int64_t half) const {
    return part(c_.w13, c_.w13_scales, 2 * slot(expert) + half, c_.inter, c_.hidden);
  }
  PackedWeight w2(int64_t expert) const { return part(c_.w2, c_.w2_scales, slot(expert), c_.hidden, c_.inter); }
  PackedWeight part(const void* base, const float* scales, int64_t index, int64_t n, int64_t k) const {
    const char* data = static_cast<const char*>(base) + static_cast<size_t>(index * n * k) * size_of(c_.w_dtype);
    return {data, c_.w_dtype, scales == nullptr ? nullptr : scales + index * n, n, k};
  }

  // One block's rows through some of an expert's gate and up panels: SiLU(gate) * up. `after`: what this thread needs next.
  void gate_up(const Block& block, int64_t chunk, const Place& after, char* scratch) const {
    char* rows = scratch + rows_at_;
    gather(block, rows);
    const PackedWeight gate = w13(block.expert, 0), up = w13(block.expert, 1);
    char* spare = scratch + panels_at_;
    auto* gates = reinterpret_cast<float*>(scratch + gates_at_);
    auto* ups = gates + tile_.max_rows * kPanel;
    const Tiles tiles(block.begin, block.end, tile_.max_rows);
    const TileUse use(tile_);
    const auto stride = static_cast<int64_t>(row_bytes(c_.hidden));
    const int64_t first = chunk * up_panels_per_task_, last = std::min(first + up_panels_per_task_, gate.panels());
    for (int64_t panel = first; panel < last; ++panel) {
      const ReadyPanel gate_panel = gate.ready(panel, isa_, spare, tiles.count);
      const ReadyPanel up_panel = up.ready(panel, isa_, spare + gate.spare_bytes(), tiles.count);
      const Place next = panel + 1 < last ? Place{block.expert, panel + 1} : after;
      const char* next_gate = w13(next.expert, 0).panel(next.panel);
      const char* next_up = w13(next.expert, 1).panel(next.panel);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int m = tiles.size(tile);
        const char* a = rows + (tiles.at(tile) - block.begin) * stride;
        gate_panel.tile({a, stride, gate_panel.data, c_.hidden, m, gates, kPanel, false, ahead(tiles, tile, gate, next_gate)});
        up_panel.tile({a, stride, up_panel.data, c_.hidden, m, ups, kPanel, false, ahead(tiles, tile, up, next_up)});
        gate.scale(panel, isa_, gates, kPanel, m);
        up.scale(panel, isa_, ups, kPanel, m);
        if (c_.w13_bias != nullptr) {
          const float* bias = c_.w13_bias + 2 * block.expert * c_.inter + panel * kPanel;
          add_bias(gates, kPanel, m, bias, gate.width(panel));
          add_bias(ups, kPanel, m, bias + c_.inter, up.width(panel));
        }
        mix(gates, ups, m, inter_row(tiles.at(tile)) + row_bytes(panel * kPanel));
      }
    }
  }

  static void add_bias(float* rows, int64_t stride, int m, const float* bias, int64_t width) {
    for (int i = 0; i < m; ++i) add_row(rows + i * stride, bias, width);
  }

  void mix(const float* gates, const float* ups, int m, char* to) const {
    const auto stride = static_cast<int64_t>(inter_stride_);
    if (c_.clamped)
      isa_.clamped_mul(gates, ups, m, c_.alpha, c_.limit, row_dtype_, to, stride);
    else
      isa_.silu_mul(gates, ups, m, row_dtype_, to, stride);
  }

  static Ahead ahead(const Tiles& tiles, int64_t tile, const PackedWeight& weight, const char* next) {
    return tiles.ahead(tile, next, weight.panel_bytes(), tile_steps(weight.dtype, weight.k));
  }

  void gather(const Block& block, char* rows) const {
    const size_t from_bytes = static_cast<size_t>(c_.x_stride) * size_of(c_.x_dtype);
    const auto* x = static_cast<const char*>(c_.x);
    for (int64_t row = block.begin; row < block.end; ++row, rows += row_bytes(c_.hidden)) {
      if (row + 1 < block.end)
        fetch(x + routing_.rows[row + 1].token * from_bytes, static_cast<size_t>(c_.hidden) * size_of(c_.x_dtype));
      convert_row(rows, row_dtype_, x + routing_.rows[row].token * from_bytes, c_.x_dtype, c_.hidden);
    }
  }

  static void fetch(const void* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
  }

  // Some columns of the output for a group of tokens: down products of all experts, then each token's sum.
  void down(int64_t chunk, int64_t group, const Place& after, char* scratch) const {
    const int64_t first = chunk * down_panels_per_task_, begin = group * tokens_per_group_;
    const int64_t end = std::min(c_.tokens, begin + tokens_per_group_);
    const int64_t panels = std::min(down_panels_per_task_, divide_up(c_.hidden, kPanel) - first);
    const int64_t stride = panels * kPanel;
    auto* slots = reinterpret_cast<int32_t*>(scratch + slots_at_);
    auto* products = reinterpret_cast<float*>(scratch + products_at_);
    const TileUse use(tile_);
    int64_t slot = 0;
    for (int64_t expert = 0; expert < c_.experts; ++expert) {
      const auto [from, to] = routing_.rows_of(expert, begin, end);
      if (from == to) continue;
      const Place next = expert + 1 < c_.experts ? Place{expert + 1, first} : after;
      for (int64_t row = from; row < to; ++row)
        slots[routing_.rows[row].place - begin * c_.top_k] = static_cast<int32_t>(slot + row - from);
      down_products(expert, Tiles(from, to, tile_.max_rows), first, panels, next, products + slot * stride, scratch);
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

  void down_products(int64_t expert, const Tiles& tiles, int64_t first, int64_t panels, const Place& after, float* products,
                     char* scratch) const {
    const PackedWeight weight = w2(expert);
    for (int64_t p = 0; p < panels; ++p) {
      const ReadyPanel panel = weight.ready(first + p, isa_, scratch + panels_at_, tiles.count);
      const char* next = p + 1 < panels ? weight.panel(first + p + 1) : w2(after.expert).panel(after.panel);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        float* to = products + (tiles.at(tile) - tiles.begin) * panels * kPanel + p * kPanel;
        panel.tile({inter_row(tiles.at(tile)), static_cast<int64_t>(inter_stride_), panel.data, c_.inter, tiles.size(tile), to,
               panels * kPanel, false, ahead(tiles, tile, weight, next)});
        weight.scale(first + p, isa_, to, panels * kPanel, tiles.size(tile));
        if (c_.w2_bias != nullptr)
          add_bias(to, panels * kPanel, tiles.size(tile), c_.w2_bias + expert * c_.hidden + (first + p) * kPanel,
                   weight.width(first + p));
      }
    }
  }

  const ExpertsCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;
  const Routing routing_;
  std::vector<Block> blocks_;
  int64_t up_panels_per_task_ = 1, up_chunks_ = 1, down_panels_per_task_ = 1, down_chunks_ = 1;
  int64_t tokens_per_group_ = 1, groups_ = 1;
  size_t rows_at_ = 0, panels_at_ = 0, gates_at_ = 0, slots_at_ = 0, sum_at_ = 0, products_at_ = 0;
  size_t inter_stride_ = 0, scratch_bytes_ = 0;
  char* inter_ = nullptr;
  char* scratch_ = nullptr;
};

}  // namespace

void run_experts(const ExpertsCall& call) { Experts(call).run(); }

}  // namespace sgl_batch
