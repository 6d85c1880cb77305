// The tiles for AMX: pairs of bf16 are multiplied and added up in f32. All else is as for AVX512-BF16, see isa.cpp.
//
// Of 16 steps over k, products of even k are added up, those of odd k, then both, then that to what was there. The rest of
// k is filled up with zeros, rows are not: tiles are configured for as many as there are. So a row's order of sums is the
// same whatever is beside it. Numbers too small to be normal count as zero.
#if defined(__x86_64__)
#include <cstring>

#include "amx_panels.h"
#include "coded.h"
#include "fp4.h"
#include "fp8.h"
#include "int4.h"
#include "int8_groups.h"

namespace sgl_batch {
namespace {

struct PairProduct {
  template <int sum, int a, int b>
  static void multiply() {
    multiply_tiles<sum, a, b>();
  }
};

// The steps of a tile's panel as bf16, as they lie or copied. Steps are asked for in ascending order.
struct PanelBf16 {
  static constexpr int64_t kBytes = kStepBytes;  // of a step
  explicit PanelBf16(const Tile&) {}
  const char* block(const char* steps, char*) { return steps; }
  void copy(const char* steps, int64_t count, char* to) { std::memcpy(to, steps, static_cast<size_t>(count * kBytes)); }
};
struct PanelI8 {
  static constexpr int64_t kBytes = kStepBytes / 2;
  explicit PanelI8(const Tile&) {}
  const char* block(const char* steps, char* copied) {
    copy(steps, kSteps, copied);
    return copied;
  }
  void copy(const char* steps, int64_t count, char* to) {
    kAvx512Bf16.widen(reinterpret_cast<const int8_t*>(steps), count * kBytes, reinterpret_cast<uint16_t*>(to));
  }
};
// It is decoded block by block, so that its numbers are in the first cache when tiles read them.
struct PanelCoded {
  static constexpr int64_t kBytes = 2 * kCodedBlockBytes / kCodedBlockK;
  explicit PanelCoded(const Tile& tile)
      : panel(static_cast<const char*>(tile.panel)), base(tile.base), other(uncoded(tile.panel, tile.k)) {
    // The next panel's list begins behind its codes; it is seldom longer than this.
    const char* list = static_cast<const char*>(tile.ahead.from) + coded_bytes(tile.k);
    for (int line = 0; line < 2; ++line) __builtin_prefetch(list + line * kLineBytes, 0, 2);
  }
  const char* block(const char* steps, char* copied) {
    copy(steps, kSteps, copied);
    return copied;
  }
  void copy(const char* steps, int64_t count, char* to) {
    auto* numbers = reinterpret_cast<uint16_t*>(to);
    const auto first = static_cast<uint32_t>((steps - panel) / kBytes * 2 * kPanel);
    const auto last = first + static_cast<uint32_t>(count * 2 * kPanel);
    kAvx512Bf16.decode(steps, 2 * count / kCodedBlockK, base, numbers);
    for (; other->place < last; ++other)
      if (other->place >= first) numbers[other->place - first] = other->number;
  }

  const char* panel;
  uint32_t base;
  const Uncoded* other;  // the next number without a code
};

// Likewise. K is whole blocks, each of which the powers of two of one block of fp4 belong to.
struct PanelFp4 {
  static constexpr int64_t kBytes = 2 * 2 * kPanel / kFp4WordK;
  static_assert(kSteps * 2 == kFp4BlockK);
  explicit PanelFp4(const Tile& tile) : powers(static_cast<const uint8_t*>(tile.panel)), words(powers + fp4_power_bytes(tile.k)) {}
  const char* block(const char*, char* copied) {
    kAvx512Bf16.decode_fp4(powers, words, 1, reinterpret_cast<uint16_t*>(copied));
    powers += kPanel;
    words += kSteps * kBytes;
    return copied;
  }
  void copy(const char*, int64_t, char*) {}  // k leaves no rest

  const uint8_t* powers;
  const uint8_t* words;
};

// Likewise. Groups of int4, of fp8 and of int8 have whole blocks.
struct OfInt4 {
  using Scale = uint32_t;
  static constexpr int64_t kBlockBytes = kPanel * kInt4BlockK / 2;
  static_assert(kSteps * 2 == kInt4BlockK);
  static void decode(const Scale* scales, const void* words, uint16_t* to) {
    kAvx512Bf16.decode_int4(scales, words, kInt4BlockK, kInt4BlockK, to);
  }
};
struct OfFp8 {
  using Scale = float;
  static constexpr int64_t kBlockBytes = kPanel * kFp8BlockK;
  static_assert(kSteps * 2 == kFp8BlockK);
  static void decode(const Scale* scales, const void* words, uint16_t* to) {
    kFp8Avx512Vbmi.decode(scales, words, kFp8BlockK, kFp8BlockK, to);  // which all processors with AMX have
  }
};
struct OfInt8 {
  using Scale = float;
  static constexpr int64_t kBlockBytes = kPanel * kInt8BlockK;
  static_assert(kSteps * 2 == kInt8BlockK);
  static void decode(const Scale* scales, const void* words, uint16_t* to) {
    kAvx512Bf16.decode_int8_groups(scales, words, kInt8BlockK, kInt8BlockK, to);
  }
};
template <typename Of>
struct PanelGrouped {
  using Scale = typename Of::Scale;
  static constexpr int64_t kBytes = Of::kBlockBytes / kSteps;
  explicit PanelGrouped(const Tile& tile)
      : blocks(static_cast<int>(tile.base / (2 * kSteps))),
        scales(static_cast<const Scale*>(tile.panel)),
        words(static_cast<const char*>(tile.panel) + tile.k / tile.base * kPanel * static_cast<int64_t>(sizeof(Scale))) {}
  const char* block(const char*, char* copied) {
    Of::decode(scales, words, reinterpret_cast<uint16_t*>(copied));
    words += kSteps * kBytes;
    if (++done == blocks) done = 0, scales += kPanel;
    return copied;
  }
  void copy(const char*, int64_t, char*) {}  // k leaves no rest

  int blocks, done = 0;  // of a group
  const Scale* scales;
  const char* words;
};

inline int64_t block_bytes(const Tile& tile) { return tile.a_block == 0 ? kTileRowBytes : tile.a_block; }

// A panel of a tile's rows, and how many of k they have in common.
struct Met {
  const void* panel;
  int64_t k;

  int64_t steps() const { return tile_steps(DType::kBf16, k); }
};

// What is left of k after the whole blocks of the panel `last`, whose first `before` blocks are another's; filled up with zeros.
// Empty where nothing is left.
template <typename Panel>
struct Rest {
  Rest(const Tile& tile, const Met& last, int64_t before) : steps(last.steps() % kSteps) {
    if (steps == 0) return;
    const int64_t whole = last.steps() - steps;
    const auto bytes = static_cast<size_t>(steps * kWord);
    const char* rows = static_cast<const char*>(tile.a) + (before + whole / kSteps) * block_bytes(tile);
    for (int row = 0; row < tile.m; ++row) {
      char* to = a + row * kTileRowBytes;
      std::memcpy(to, rows + row * tile.a_stride, bytes);
      std::memset(to + bytes, 0, kTileRowBytes - bytes);
    }
    Panel(tile).copy(static_cast<const char*>(last.panel) + whole * Panel::kBytes, steps, panel);
    std::memset(panel + steps * kStepBytes, 0, static_cast<size_t>((kSteps - steps) * kStepBytes));
  }

  const int64_t steps;
  alignas(64) char a[kMaxRows * kTileRowBytes];
  alignas(64) char panel[kSteps * kStepBytes];
};

template <typename Panel, Width width = Width::kWhole>
struct Multiply {
  template <Hold hold>
  struct Of {
    static void run(const Tile& tile) { multiply(tile, {tile.panel, tile.k}, {nullptr, 0}); }
    // The first panel has whole blocks alone.
    static void run(const Tile& tile, const Met& second) { multiply(tile, {tile.panel, tile.k}, second); }

    static void multiply(const Tile& tile, const Met& first, const Met& second) {
      const bool is_one = second.k == 0;
      const Rest<Panel> rest(tile, is_one ? first : second, is_one ? 0 : first.steps() / kSteps);
      [[maybe_unused]] alignas(64) char copied[kSteps * kStepBytes];
      Panel own(tile);
      BlockPrefetch prefetch(tile.ahead);
      const auto* a = static_cast<const char*>(tile.a);
      configure(tile.m);
      const Starts<hold> starts(tile.m);
      if (tile.add)
        load_sums<width>(tile.c, tile.c_stride * kWord, starts);
      else
        zero_sums<width>(tile.c, tile.c_stride * kWord, starts);
      const auto meet = [&](const Met& met) __attribute__((always_inline)) {
        const auto* panel = static_cast<const char*>(met.panel);
        for (int64_t block = met.steps() / kSteps; block > 0; --block) {
          prefetch.advance();
          multiply_block<PairProduct, width>(a, tile.a_stride, own.block(panel, copied), starts, tile.rows_pass);
          a += block_bytes(tile);
          panel += kSteps * Panel::kBytes;
        }
      };
      meet(first);
      meet(second);
      if (rest.steps > 0) {
        prefetch.advance();
        multiply_block<PairProduct, width>(rest.a, kTileRowBytes, rest.panel, starts);
      }
      store_sums<width>(tile.c, tile.c_stride * kWord, starts);
    }
  };
};

template <typename Panel, Width width = Width::kWhole>
void run(const Tile& tile) {
  by_hold<Multiply<Panel, width>::template Of>(tile);
}

void run_two(const Tile& tile, const void* second, int64_t second_k) {
  by_hold<Multiply<PanelBf16>::template Of>(tile, Met{second, second_k});
}

}  // namespace

constexpr TileCut kCut{.max_rows = kMaxRows, .full_rows = kTwoTiles, .row_blocks = true, .best_k = 256, .passing_k = 512};

constinit const TileKernel kAmxBf16Tile{.run = run<PanelBf16>,
                                        .run_i8 = run<PanelI8>,
                                        .run_half = run<PanelBf16, Width::kHalf>,
                                        .run_two = run_two,
                                        .run_coded = run<PanelCoded>,
                                        .run_fp4 = run<PanelFp4>,
                                        .run_int4 = run<PanelGrouped<OfInt4>>,
                                        .run_fp8 = run<PanelGrouped<OfFp8>>,
                                        .run_int8_groups = run<PanelGrouped<OfInt8>>,
                                        .run_kept = nullptr,
                                        .run_kept_half = nullptr,
                                        .cut = kCut,
                                        .chained = false,
                                        .release = release};
}  // namespace sgl_batch
#endif
