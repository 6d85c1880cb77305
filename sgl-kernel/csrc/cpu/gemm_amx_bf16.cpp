// The tiles for AMX: pairs of bf16 are multiplied and added up in f32. All else is as for AVX512-BF16, see isa.cpp.
//
// Of 16 steps over k, products of even k are added up, those of odd k, then both, then that to what was there. The rest of
// k is filled up with zeros, rows are not: tiles are configured for as many as there are. So a row's order of sums is the
// same whatever is beside it. Numbers too small to be normal count as zero.
//
// The configuration belongs to the thread, where others want their own (oneDNN, which torch uses, has AMX kernels too).
// It is loaded by the first tile of a task and where the number of rows changes, since loading costs as much as several
// steps, and is released at the task's end: others find tiles as if nobody had used them, and no task trusts what it did
// not load itself.
#if defined(__x86_64__)
#include <cstring>
#include <initializer_list>

#include "amx_tiles.h"
#include "gemm.h"

namespace sgl_batch {
namespace {

constexpr int kSteps = kTileRows;  // steps over k of a block, each a pair of bf16 for each row and column
constexpr int kPair = 4;           // bytes
static_assert(kSteps * kPair == kTileRowBytes && kPanel * kPair == 2 * kTileRowBytes && kMaxRows == 2 * kTileRows);
static_assert(kStepBytes == kPanel * kPair);

// Tiles 0 to 3: sums, of the first and the second 16 rows by the first and the second 16 columns. 4 and 5: those rows of
// a. 6 and 7: those columns of the panel.
TileConfig config_for(int rows) {
  TileConfig config;
  const auto set = [&config](int tile, int count) {
    config.rows[tile] = static_cast<uint8_t>(count);
    config.row_bytes[tile] = static_cast<uint16_t>(count > 0 ? kTileRowBytes : 0);
  };
  const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
  for (const int tile : {0, 1, 4}) set(tile, first);
  for (const int tile : {2, 3, 5}) set(tile, second);
  for (const int tile : {6, 7}) set(tile, kSteps);
  return config;
}

thread_local int configured_rows = 0;  // by this task

void configure(int rows) {
  if (configured_rows == rows) return;
  configure_tiles(config_for(rows));
  configured_rows = rows;
}

void release() {
  release_tiles();
  configured_rows = 0;
}

// Some steps of a panel, as they lie or copied, as bf16.
struct PanelBf16 {
  static constexpr int64_t kBytes = kStepBytes;  // of a step
  static const char* block(const char* panel, char*) { return panel; }
  static void copy(const char* panel, int64_t steps, char* to) { std::memcpy(to, panel, static_cast<size_t>(steps * kBytes)); }
};
struct PanelI8 {
  static constexpr int64_t kBytes = kStepBytes / 2;
  static const char* block(const char* panel, char* copied) {
    copy(panel, kSteps, copied);
    return copied;
  }
  static void copy(const char* panel, int64_t steps, char* to) {
    kAvx512Bf16.widen(reinterpret_cast<const int8_t*>(panel), steps * kBytes, reinterpret_cast<uint16_t*>(to));
  }
};

// What is left of k after its whole blocks, filled up with zeros. Empty where nothing is left.
template <typename Panel>
struct Rest {
  explicit Rest(const Tile& tile) : steps(tile_steps(DType::kBf16, tile.k) % kSteps) {
    if (steps == 0) return;
    const int64_t whole = tile_steps(DType::kBf16, tile.k) - steps;
    const auto bytes = static_cast<size_t>(steps * kPair);
    for (int row = 0; row < tile.m; ++row) {
      char* to = a + row * kTileRowBytes;
      std::memcpy(to, static_cast<const char*>(tile.a) + row * tile.a_stride + whole * kPair, bytes);
      std::memset(to + bytes, 0, kTileRowBytes - bytes);
    }
    Panel::copy(static_cast<const char*>(tile.panel) + whole * Panel::kBytes, steps, panel);
    std::memset(panel + steps * kStepBytes, 0, static_cast<size_t>((kSteps - steps) * kStepBytes));
  }

  const int64_t steps;
  alignas(64) char a[kMaxRows * kTileRowBytes];
  alignas(64) char panel[kSteps * kStepBytes];
};

// Brings what comes next closer. To the second cache: a panel is more than the first one holds.
struct Prefetch {
  explicit Prefetch(const Ahead& ahead) : at(static_cast<const char*>(ahead.from)), bytes(ahead.step * kSteps) {}
  void advance() {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    at += bytes;
  }

  const char* at;
  int64_t bytes;
};

template <bool two>
void begin_sums(const Tile& tile) {
  float* c = tile.c;
  const int64_t stride = tile.c_stride * 4;
  if (!tile.add) {
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (two) zero_tile<2>();
    if constexpr (two) zero_tile<3>();
    return;
  }
  load_tile<0>(c, stride);
  load_tile<1>(c + kTileRows, stride);
  if constexpr (two) load_tile<2>(c + kTileRows * tile.c_stride, stride);
  if constexpr (two) load_tile<3>(c + kTileRows * tile.c_stride + kTileRows, stride);
}

template <bool two>
void end_sums(const Tile& tile) {
  float* c = tile.c;
  const int64_t stride = tile.c_stride * 4;
  store_tile<0>(c, stride);
  store_tile<1>(c + kTileRows, stride);
  if constexpr (two) store_tile<2>(c + kTileRows * tile.c_stride, stride);
  if constexpr (two) store_tile<3>(c + kTileRows * tile.c_stride + kTileRows, stride);
}

template <bool two>
inline void multiply_block(const char* a, int64_t stride, const char* panel) {
  load_tile<6>(panel, kStepBytes);
  load_tile<4>(a, stride);
  multiply_tiles<0, 4, 6>();
  load_tile<7>(panel + kTileRowBytes, kStepBytes);
  multiply_tiles<1, 4, 7>();
  if constexpr (two) {
    load_tile<5>(a + kTileRows * stride, stride);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
}

template <bool two, typename Panel>
void multiply(const Tile& tile) {
  const Rest<Panel> rest(tile);
  [[maybe_unused]] alignas(64) char copied[kSteps * kStepBytes];
  Prefetch prefetch(tile.ahead);
  const auto* a = static_cast<const char*>(tile.a);
  const auto* panel = static_cast<const char*>(tile.panel);
  configure(tile.m);
  begin_sums<two>(tile);
  for (int64_t block = tile_steps(DType::kBf16, tile.k) / kSteps; block > 0; --block) {
    prefetch.advance();
    multiply_block<two>(a, tile.a_stride, Panel::block(panel, copied));
    a += kTileRowBytes;
    panel += kSteps * Panel::kBytes;
  }
  if (rest.steps > 0) {
    prefetch.advance();
    multiply_block<two>(rest.a, kTileRowBytes, rest.panel);
  }
  end_sums<two>(tile);
}

template <typename Panel>
void run(const Tile& tile) {
  tile.m > kTileRows ? multiply<true, Panel>(tile) : multiply<false, Panel>(tile);
}

}  // namespace

constinit const TileKernel kAmxBf16Tile{
    .run = run<PanelBf16>, .run_i8 = run<PanelI8>, .max_rows = kMaxRows, .release = release};
}  // namespace sgl_batch
#endif
