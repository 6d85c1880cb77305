#include "experts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "expert_plan.h"
#include "packing.h"
#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

class Experts {
 public:
  explicit Experts(const ExpertsCall& call)
      : c_(call),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(call.w_dtype)),
        tile_(isa_.tile(call.w_dtype)),
        block_rows_(rows_per_block(tile_.cut, 2 * call.hidden, call.w13_marks != nullptr || has_groups(call.w_dtype))),
        plan_(call, cut()),
        rows_(plan_.routing().rows.data()),
        by_experts_(!tile_.cut.row_blocks && call.part == ExpertsPart::kBoth && plan_.goes_by_experts()) {
    for (const Block& block : plan_.blocks())
      if (c_.slots != nullptr && c_.slots[block.expert] < 0)
        throw std::invalid_argument("expert " + std::to_string(block.expert) + " has " +
                                    std::to_string(c_.rows_per_expert[block.expert]) + " rows and no slot");
  }

  void run() {
    if (c_.tokens == 0) return;
    lay_out();
    if (by_experts_) return run_by_experts();
    if (c_.part != ExpertsPart::kDown) {
      const int64_t tasks = plan_.up_tasks();
      run_tasks_ahead(tasks, [this, tasks](int64_t task, int64_t next, int thread) {
        gate_up(plan_.up(task), plan_.up(std::min(next, tasks - 1)), scratch(thread));
      });
    }
    if (c_.part == ExpertsPart::kUp) return;
    const int64_t tasks = plan_.down_tasks();
    run_tasks_ahead(tasks, [this, tasks](int64_t task, int64_t next, int thread) {
      down(plan_.down(task), {0, plan_.down(std::min(next, tasks - 1)).first}, scratch(thread));
    });
  }

 private:
  // Few rows: a thread goes through all of an expert's matrices, each in one piece, and what it gives is added up in the end.
  void run_by_experts() {
    const auto count = static_cast<int64_t>(plan_.blocks().size());
    run_tasks(count, [this](int64_t task, int thread) { whole_expert(plan_.blocks()[task], scratch(thread)); });
    run_token_sums(c_.tokens, [this](int64_t begin, int64_t end, int thread) {
      sum_whole_products(c_, plan_.routing(), begin, end, all_products_, out_stride_, scratch(thread) + sums_at_);
    });
  }

  ExpertCut cut() const {
    const int64_t panel_bytes = packed_bytes(c_.w_dtype, kPanel * c_.inter);
    if (!tile_.cut.row_blocks)
      return {.tiles = tile_.cut, .rows_per_block = block_rows_, .rows_per_group = kGroupRowsPerMiB * second_cache_mib(),
              .down_panel_bytes = panel_bytes};
    return {.tiles = tile_.cut, .rows_per_block = block_rows_, .rows_per_group = kGroupRowsOfBlocks, .down_panel_bytes = panel_bytes,
            .down_panels = kDownPanelsOfBlocks};
  }

  void lay_out() {
    Carver one;
    const RowLayout layout = x_layout(block_rows_);
    rows_at_ = one.take(layout.room(block_rows_, row_bytes(c_.hidden)));
    converted_at_ = one.take(static_cast<size_t>(row_bytes(c_.hidden)));
    panels_at_ = one.take(std::max(2 * w13(0, 0).spare_bytes(isa_), plan_.down_panels_per_task() * w2(0).spare_bytes(isa_)));
    const int64_t up_rows = 2 * (c_.hidden > tile_.cut.best_k ? block_rows_ : tile_.cut.max_rows);
    const int64_t down_rows = plan_.down_panels_per_task() * tile_.cut.max_rows;
    products_at_ = one.take(sizeof(float) * kPanel * static_cast<size_t>(std::max(up_rows, down_rows)));
    out_stride_ = round_up(c_.hidden, kPanel);
    sums_at_ = one.take(by_experts_ ? TokenSums::room_bytes(plan_.routing(), most_tokens_of_sum(c_.tokens), out_stride_)
                                    : TokenSums::room_bytes(plan_.routing(), plan_.tokens_per_group(),
                                                            kPanel * plan_.down_panels_per_task()));
    gates_at_ = one.take(by_experts_ ? sizeof(float) * static_cast<size_t>(block_rows_ * round_up(c_.inter, kPanel)) : 0);
    Carver all;
    // Panels are stored whole, so that a row has room for its last one.
    const bool whole = c_.part == ExpertsPart::kBoth;
    const auto rows = static_cast<int64_t>(plan_.routing().rows.size());
    const auto padded = row_bytes(round_up(c_.inter, kPanel));
    if (whole && tile_.cut.row_blocks)
      inter_layout_ = RowLayout::blocks(rows);
    else
      inter_layout_ = RowLayout::plain(whole ? row_stride(padded) : c_.between_stride);
    const size_t products_at = all.take(by_experts_ ? sizeof(float) * static_cast<size_t>(rows * out_stride_) : 0);
    const size_t inter_at = all.take(whole ? inter_layout_.room(rows, padded) : 0);
    scratch_bytes_ = (one.total() + 4095) / 4096 * 4096;
    const size_t scratch_at = all.take(scratch_bytes_ * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(all.total()));
    inter_ = whole ? base + inter_at : static_cast<char*>(c_.between);
    scratch_ = base + scratch_at;
    all_products_ = reinterpret_cast<float*>(base + products_at);
    all.guard(base);
    for (int thread = 0; thread < num_threads(); ++thread) one.guard(scratch(thread));
  }

  char* scratch(int thread) const { return scratch_ + scratch_bytes_ * thread; }
  int64_t row_bytes(int64_t numbers) const { return numbers * static_cast<int64_t>(size_of(row_dtype_)); }
  char* inter_at(int64_t row, int64_t k) const { return inter_ + inter_layout_.at(row, row_bytes(k)); }
  // How `rows` gathered ones lie.
  RowLayout x_layout(int64_t rows) const {
    if (tile_.cut.row_blocks) return RowLayout::blocks(rows);
    return RowLayout::plain(row_stride(row_bytes(c_.hidden)));
  }
  int64_t x_bytes() const { return c_.hidden * static_cast<int64_t>(size_of(c_.x_dtype)); }
  const char* x_row(int64_t row) const {
    return static_cast<const char*>(c_.x) + rows_[row].token * c_.x_stride * static_cast<int64_t>(size_of(c_.x_dtype));
  }

  // Of an expert that is not there any slot: it is looked ahead to, never computed with.
  int64_t slot(int64_t expert) const { return c_.slots == nullptr ? expert : std::max(0, c_.slots[expert]); }

  // The gate matrix of an expert (half 0) or its up matrix (half 1).
  PackedWeight w13(int64_t expert, int64_t half) const {
    return part(c_.w13, c_.w13_scales, c_.w13_marks, 2 * slot(expert) + half, c_.inter, c_.hidden);
  }
  PackedWeight w2(int64_t expert) const { return part(c_.w2, c_.w2_scales, c_.w2_marks, slot(expert), c_.hidden, c_.inter); }
  PackedWeight part(const void* base, const float* scales, const uint8_t* marks, int64_t index, int64_t n, int64_t k) const {
    const char* data = static_cast<const char*>(base) + packed_bytes(c_.w_dtype, index * n * k);
    return {data, c_.w_dtype, scales == nullptr ? nullptr : scales + index * n, n, k,
            marks == nullptr ? nullptr : marks + index * divide_up(n, kPanel)};
  }

  // One block's rows through some of an expert's gate and up panels: SiLU(gate) * up. `after`: what this thread does next.
  void gate_up(const UpTask& task, const UpTask& after, char* scratch) const {
    const Block& block = task.block;
    char* rows = scratch + rows_at_;
    const RowLayout layout = x_layout(block.end - block.begin);
    gather(block, rows, layout, scratch + converted_at_);
    const PackedWeight gate = w13(block.expert, 0), up = w13(block.expert, 1);
    char* spare = scratch + panels_at_;
    auto* products = reinterpret_cast<float*>(scratch + products_at_);
    const Tiles tiles(block.begin, block.end, tile_.cut);
    const bool rows_pass = tiles.rows_pass(tile_.cut);
    const KParts parts = tiles.parts(c_.hidden, tile_.cut, kBlockK, rows_pass);
    const TileUse use(tile_);
    const int64_t calls = 2 * (task.last - task.first) * tiles.count * parts.count;
    int64_t call = 0;
    for (int64_t panel = task.first; panel < task.last; ++panel) {
      ReadyPanel gate_panel = gate.ready(panel, isa_, spare, tiles.count);
      ReadyPanel up_panel = up.ready(panel, isa_, spare + gate.spare_bytes(isa_), tiles.count);
      gate_panel.rows_pass = up_panel.rows_pass = rows_pass;
      const Place next = panel + 1 < task.last ? Place{block.expert, panel + 1} : Place{after.block.expert, after.first};
      const char* next_gate = w13(next.expert, 0).panel(next.panel);
      const char* next_up = w13(next.expert, 1).panel(next.panel);
      const auto multiply = [&](int64_t part, int64_t tile, const PackedWeight& weight, ReadyPanel& ready, const char* next_panel,
                                float* to) {
        const int64_t k = parts.at(part);
        const Ahead soon = ahead(tiles, tile, weight, next_panel, k);
        const char* own = rows + layout.at(tiles.at(tile) - block.begin, row_bytes(k));
        ready.multiply({own, layout.row, ready.from(k), parts.length(part), tiles.size(tile), to, kPanel, part > 0,
                    with_x_rows(soon, after.block, call++, calls, parts.length(part)), layout.block});
      };
      // A tile's gates, then its ups; of several parts all tiles' stay.
      const auto gates_at = [&](int64_t tile) { return products + (parts.count > 1 ? 2 * (tiles.at(tile) - block.begin) * kPanel : 0); };
      const auto ups_at = [&](int64_t tile) { return gates_at(tile) + tiles.size(tile) * kPanel; };
      // Part by part, one of the two panels at a time stays in the first cache.
      for (int64_t part = 0; parts.count > 1 && part < parts.count; ++part) {
        for (int64_t tile = 0; tile < tiles.count; ++tile) multiply(part, tile, gate, gate_panel, next_gate, gates_at(tile));
        for (int64_t tile = 0; tile < tiles.count; ++tile) multiply(part, tile, up, up_panel, next_up, ups_at(tile));
      }
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int m = tiles.size(tile);
        float *const gates = gates_at(tile), *const ups = ups_at(tile);
        char* to = inter_at(tiles.at(tile), panel * kPanel);
        fetch_rows_to_write(to, inter_layout_.row, m, static_cast<size_t>(row_bytes(kPanel)));
        if (parts.count == 1) {
          multiply(0, tile, gate, gate_panel, next_gate, gates);
          multiply(0, tile, up, up_panel, next_up, ups);
        }
        gate.scale(panel, isa_, gates, kPanel, m);
        up.scale(panel, isa_, ups, kPanel, m);
        if (c_.w13_bias != nullptr) {
          const float* bias = c_.w13_bias + 2 * block.expert * c_.inter + panel * kPanel;
          add_bias(gates, kPanel, m, bias, gate.width(panel));
          add_bias(ups, kPanel, m, bias + c_.inter, up.width(panel));
        }
        mix(gates, ups, m, to);
      }
    }
  }

  static void add_bias(float* rows, int64_t stride, int m, const float* bias, int64_t width) {
    for (int i = 0; i < m; ++i) add_row(rows + i * stride, bias, width);
  }

  void mix(const float* gates, const float* ups, int m, char* to) const {
    const int64_t stride = inter_layout_.row;
    if (c_.clamped)
      isa_.clamped_mul(gates, ups, m, c_.alpha, c_.limit, row_dtype_, to, stride);
    else
      isa_.silu_mul(gates, ups, m, row_dtype_, to, stride);
  }

  static Ahead ahead(const Tiles& tiles, int64_t tile, const PackedWeight& weight, const char* next, int64_t k) {
    return tiles.ahead(tile, next, weight.filled_bytes(), tile_steps(weight.dtype, weight.k), tile_steps(weight.dtype, k),
                       rows_without_lines(weight.dtype));
  }

  // A tile's share of the rows that the next block gathers: the given one of `calls`, of so many k, brings a row, or a part of one.
  Ahead with_x_rows(const Ahead& panel, const Block& next, int64_t call, int64_t calls, int64_t k) const {
    const int64_t steps = tile_steps(c_.w_dtype, k);
    int64_t bytes = divide_up(x_bytes(), std::max<int64_t>(1, calls / (next.end - next.begin)));
    // Whole lines in each block of k, so that none is asked for twice.
    if (tile_.cut.row_blocks) bytes = round_up(bytes, divide_up(2 * steps, kBlockK) * kLineBytes);
    const int64_t parts = divide_up(x_bytes(), bytes), row = next.begin + call / parts;
    if (row >= next.end) return panel;
    return Tiles::with_rows(panel, x_row(row) + call % parts * bytes, bytes, steps);
  }

  void whole_expert(const Block& block, char* scratch) const {
    char* rows = scratch + rows_at_;
    const RowLayout layout = x_layout(block.end - block.begin);
    gather(block, rows, layout, scratch + converted_at_);
    auto* gates = reinterpret_cast<float*>(scratch + gates_at_);
    const TileUse use(tile_);
    const Tiles tiles(block.begin, block.end, tile_.cut);
    const PackedWeight gate = w13(block.expert, 0), up = w13(block.expert, 1), down = w2(block.expert);
    const auto x_at = [&](int64_t tile) { return rows + layout.at(tiles.at(tile) - block.begin, 0); };
    // A tile's gates of one panel follow another; so do those of the next one.
    const auto gates_of = [&](int64_t panel, int64_t tile) {
      return gates + (panel * tiles.rows + tiles.at(tile) - block.begin) * kPanel;
    };
    each_tile(gate, c_.w13_bias, 2 * block.expert, up.panel(0), tiles, scratch, [&](int64_t panel, int64_t tile, const auto& multiply) {
      multiply(x_at(tile), layout, gates_of(panel, tile), kPanel);
    });
    alignas(64) float ups[kMaxRows * kPanel];
    each_tile(up, c_.w13_bias, 2 * block.expert + 1, down.panel(0), tiles, scratch,
              [&](int64_t panel, int64_t tile, const auto& multiply) {
                multiply(x_at(tile), layout, ups, kPanel);
                mix(gates_of(panel, tile), ups, tiles.size(tile), inter_at(tiles.at(tile), panel * kPanel));
              });
    each_tile(down, c_.w2_bias, block.expert, down.panel(0), tiles, scratch, [&](int64_t panel, int64_t tile, const auto& multiply) {
      multiply(inter_at(tiles.at(tile), 0), inter_layout_, all_products_ + tiles.at(tile) * out_stride_ + panel * kPanel, out_stride_);
    });
  }

  // All panels of a matrix, the given one of those that have biases, with all tiles each: calls each(panel, tile, multiply), which
  // calls multiply(rows, their layout, to, stride). `after`: what is read next.
  template <typename Each>
  void each_tile(const PackedWeight& weight, const float* biases, int64_t index, const char* after, const Tiles& tiles, char* scratch,
                 const Each& each) const {
    for (int64_t panel = 0; panel < weight.panels(); ++panel) {
      ReadyPanel ready = weight.ready(panel, isa_, scratch + panels_at_, tiles.count);
      const char* next = panel + 1 < weight.panels() ? weight.panel(panel + 1) : after;
      for (int64_t tile = 0; tile < tiles.count; ++tile)
        each(panel, tile, [&](const char* rows, const RowLayout& layout, float* to, int64_t stride) {
          const int m = tiles.size(tile);
          ready.multiply({rows, layout.row, ready.from(0), weight.k, m, to, stride, false, ahead(tiles, tile, weight, next, 0), layout.block});
          weight.scale(panel, isa_, to, stride, m);
          if (biases != nullptr) add_bias(to, stride, m, biases + index * weight.n + panel * kPanel, weight.width(panel));
        });
    }
  }

  void gather(const Block& block, char* rows, const RowLayout& layout, char* converted) const {
    for (int64_t row = block.begin; row < block.end; ++row) {
      if (row + 1 < block.end) fetch(x_row(row + 1), static_cast<size_t>(x_bytes()));
      char* to = rows + layout.at(row - block.begin, 0);
      if (!tile_.cut.row_blocks) {
        convert_row(to, row_dtype_, x_row(row), c_.x_dtype, c_.hidden);
        continue;
      }
      if (row_dtype_ != c_.x_dtype) convert_row(converted, row_dtype_, x_row(row), c_.x_dtype, c_.hidden);
      spread_row(to, layout.block, row_dtype_ == c_.x_dtype ? x_row(row) : converted, row_bytes(c_.hidden));
    }
  }

  // `after`: what this thread needs next.
  void down(const DownTask& task, const Place& after, char* scratch) const {
    const TileUse use(tile_);
    sum_down_products(c_, plan_, task, after, scratch + sums_at_,
                      [&](int64_t expert, int64_t from, int64_t to, const Place& next, TokenSums& sums) {
                        down_products(expert, Tiles(from, to, tile_.cut), task, next, sums, scratch);
                      });
  }

  void down_products(int64_t expert, const Tiles& tiles, const DownTask& task, const Place& after, TokenSums& sums,
                     char* scratch) const {
    const PackedWeight weight = w2(expert), later = w2(after.expert);
    auto* products = reinterpret_cast<float*>(scratch + products_at_);
    const int64_t panels = task.last - task.first, stride = panels * kPanel;
    const KParts parts = tiles.parts(c_.inter, tile_.cut);
    ReadyPanel ready[kMostDownPanelsPerTask];
    for (int64_t p = 0; p < panels; ++p)
      ready[p] = weight.ready(task.first + p, isa_, scratch + panels_at_ + p * weight.spare_bytes(isa_), tiles.count);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int m = tiles.size(tile);
      for (int64_t part = 0; part < parts.count; ++part)
        for (int64_t p = 0; p < panels; ++p) {
          const int64_t k = parts.at(part);
          Ahead soon = ahead(tiles, tile, weight, later.panel(std::min(after.panel + p, later.panels() - 1)), k);
          soon = with_inter_rows(soon, tiles, tile, plan_.first_row(after.expert, task.group), k, p, panels);
          ready[p].multiply({inter_at(tiles.at(tile), k), inter_layout_.row, ready[p].from(k), parts.length(part), m, products + p * kPanel,
                         stride, part > 0, soon, inter_layout_.block});
        }
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t panel = task.first + p;
        float* to = products + p * kPanel;
        weight.scale(panel, isa_, to, stride, m);
        if (c_.w2_bias != nullptr)
          add_bias(to, stride, m, c_.w2_bias + expert * c_.hidden + panel * kPanel, weight.width(panel));
      }
      sums.add(tiles.at(tile), m, products);
    }
  }

  // The rows of the next tile, or those from `later` on. By blocks of k each of `panels` tiles brings its share of them,
  // otherwise the first one all.
  Ahead with_inter_rows(const Ahead& panel, const Tiles& tiles, int64_t tile, int64_t later, int64_t k, int64_t share,
                        int64_t panels) const {
    const bool last = tile + 1 == tiles.count;
    const int64_t count = last ? tile_.cut.usual_rows() : tiles.size(tile + 1);
    const char* rows = inter_at(last ? later : tiles.at(tile + 1), k);
    if (!inter_layout_.by_blocks())
      return share > 0 ? panel : Tiles::with_rows(panel, rows, count * inter_layout_.row, tile_steps(c_.w_dtype, c_.inter));
    // Of each block of k its rows.
    const int64_t own = divide_up(count, panels);
    Ahead both = panel;
    bring_blocks(both, rows + std::min(share * own, count) * inter_layout_.row, own, inter_layout_);
    return both;
  }

  const ExpertsCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;
  const int64_t block_rows_;
  const ExpertPlan plan_;
  const RoutedRow* const rows_;
  const bool by_experts_;
  size_t rows_at_ = 0, converted_at_ = 0, panels_at_ = 0, products_at_ = 0, sums_at_ = 0, gates_at_ = 0, scratch_bytes_ = 0;
  int64_t out_stride_ = 0;          // floats
  float* all_products_ = nullptr;   // of all routed rows, by expert
  RowLayout inter_layout_{};
  char* inter_ = nullptr;
  char* scratch_ = nullptr;
};

}  // namespace

void run_experts(const ExpertsCall& call) { Experts(call).run(); }

}  // namespace sgl_batch
