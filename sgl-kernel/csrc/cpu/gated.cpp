#include "gated.h"

#include <algorithm>
#include <cstring>

#include "rows.h"
#include "tasks.h"
#include "workspace.h"

namespace sgl_batch {
namespace {

class Gated {
 public:
  explicit Gated(const GatedCall& call)
      : c_(call),
        isa_(isa()),
        row_dtype_(isa_.row_dtype(c_.w_dtype)),
        tile_(isa_.tile(c_.w_dtype)),
        gate_{c_.w13, c_.w_dtype, c_.scales, c_.inter, c_.hidden},
        up_{static_cast<const char*>(c_.w13) + packed_bytes(c_.w_dtype, c_.inter * c_.hidden), c_.w_dtype,
            c_.scales == nullptr ? nullptr : c_.scales + c_.inter, c_.inter, c_.hidden},
        first_panel_(c_.first / kPanel),
        panels_(divide_up(c_.last, kPanel) - first_panel_),
        blocks_(divide_up(c_.rows, kTilesPerBlock * tile_.cut.max_rows)),
        chunks_(std::clamp<int64_t>(divide_up(kTasksPerThread * num_threads(), blocks_), 1, panels_)),
        row_bytes_(c_.hidden * static_cast<int64_t>(size_of(row_dtype_))),
        in_place_(row_dtype_ == c_.x_dtype && (blocks_ == 1 || row_stride(row_bytes_) == row_bytes_)),
        stride_(in_place_ ? row_bytes_ : row_stride(row_bytes_)) {}

  void run() {
    Carver carver;
    const size_t rows_at = carver.take(in_place_ ? 0 : static_cast<size_t>(stride_ * c_.rows));
    const size_t spare_at = carver.take(2 * gate_.spare_bytes(isa_) * num_threads());
    static thread_local Workspace workspace;
    char* base = static_cast<char*>(workspace.at_least(carver.total()));
    carver.guard(base);
    rows_ = in_place_ ? static_cast<const char*>(c_.x) : base + rows_at;
    if (!in_place_) run_tasks(blocks_, [&](int64_t block, int) { convert(block, base + rows_at); });
    // The blocks of one chunk come one after the other: its weights are then in the caches.
    run_tasks(chunks_ * blocks_, [&](int64_t task, int thread) {
      multiply(task / blocks_, task % blocks_, base + spare_at + 2 * gate_.spare_bytes(isa_) * thread);
    });
  }

 private:
  int64_t block_begin(int64_t block) const { return c_.rows * block / blocks_; }

  void convert(int64_t block, char* to) const {
    const auto x_bytes = static_cast<int64_t>(size_of(c_.x_dtype)) * c_.hidden;
    for (int64_t row = block_begin(block); row < block_begin(block + 1); ++row)
      convert_row(to + row * stride_, row_dtype_, static_cast<const char*>(c_.x) + row * x_bytes, c_.x_dtype, c_.hidden);
  }

  // A block of rows through a chunk of the panels of gate and up.
  void multiply(int64_t chunk, int64_t block, char* spare) const {
    const Tiles tiles(block_begin(block), block_begin(block + 1), tile_.cut);
    const TileUse use(tile_);
    alignas(64) float gates[kMaxRows * kPanel], ups[kMaxRows * kPanel];
    const int64_t end = first_panel_ + panels_ * (chunk + 1) / chunks_;
    for (int64_t panel = first_panel_ + panels_ * chunk / chunks_; panel < end; ++panel) {
      ReadyPanel gate = gate_.ready(panel, isa_, spare, tiles.count);
      ReadyPanel up = up_.ready(panel, isa_, spare + gate_.spare_bytes(isa_), tiles.count);
      const int64_t next = std::min(panel + 1, gate_.panels() - 1);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int m = tiles.size(tile);
        product(gate_, gate, panel, up_.panel(panel), tiles, tile, gates);
        product(up_, up, panel, gate_.panel(next), tiles, tile, ups);
        store(panel, tiles.at(tile), m, gates, ups);
      }
    }
  }

  void product(const PackedWeight& weight, ReadyPanel& ready, int64_t panel, const char* after, const Tiles& tiles,
               int64_t tile, float* to) const {
    const int m = tiles.size(tile);
    ready.multiply({rows_ + tiles.at(tile) * stride_, stride_, ready.data, c_.hidden, m, to, kPanel, false,
                    tiles.ahead(tile, after, weight.panel_bytes(), tile_steps(weight.dtype, c_.hidden), 0, rows_without_lines(weight.dtype))});
    weight.scale(panel, isa_, to, kPanel, m);
  }

  void store(int64_t panel, int64_t row, int m, const float* gates, const float* ups) const {
    const auto element = static_cast<int64_t>(size_of(row_dtype_));
    const int64_t out_bytes = (c_.last - c_.first) * element, width = gate_.width(panel);
    char* to = static_cast<char*>(c_.out) + row * out_bytes + (panel * kPanel - c_.first) * element;
    if (width == kPanel) {
      isa_.silu_mul(gates, ups, m, row_dtype_, to, out_bytes);
      return;
    }
    alignas(64) char whole[kMaxRows * kPanel * 4];
    isa_.silu_mul(gates, ups, m, row_dtype_, whole, kPanel * element);
    for (int i = 0; i < m; ++i) std::memcpy(to + i * out_bytes, whole + i * kPanel * element, static_cast<size_t>(width * element));
  }

  const GatedCall& c_;
  const Isa& isa_;
  const DType row_dtype_;
  const TileKernel& tile_;
  const PackedWeight gate_, up_;
  const int64_t first_panel_, panels_, blocks_, chunks_, row_bytes_;
  const bool in_place_;  // rows meet weights as they are given
  const int64_t stride_;  // from row to row when they do
  const char* rows_ = nullptr;
};

}  // namespace

void run_gated(const GatedCall& call) {
  if (call.rows > 0 && call.last > call.first) Gated(call).run();
}

}  // namespace sgl_batch
