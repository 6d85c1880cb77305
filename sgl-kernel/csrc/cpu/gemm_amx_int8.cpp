// The int8 kernel for AMX: quads of bytes are multiplied and added up in int32, exactly.
#if defined(__x86_64__)
#include <cstring>

#include "amx_panels.h"
#include "gemm_int8.h"

namespace sgl_batch {
namespace {

static_assert(kRowBytes == kTileRowBytes, "a row can be read in whole blocks");

struct ByteProduct {
  template <int sum, int a, int b>
  static void multiply() {
    multiply_byte_tiles<sum, a, b>();
  }
};

template <Hold hold>
struct Multiply {
  static void run(const Int8Tile& tile) {
    constexpr int64_t kSumStride = kPanel * kWord;
    const int64_t rest = tile.steps % kSteps;
    BlockPrefetch prefetch(tile.ahead);
    const auto* a = tile.a;
    const auto* panel = tile.panel;
    configure(tile.m);
    const Starts<hold> starts(tile.m);
    if (tile.add)
      load_sums(tile.c, kSumStride, starts);
    else
      zero_sums(tile.c, kSumStride, starts);
    for (int64_t block = tile.steps / kSteps; block > 0; --block) {
      prefetch.advance();
      multiply_block<ByteProduct>(a, tile.a_stride, panel, starts, tile.rows_pass);
      a += tile.a_block;
      panel += kSteps * kStepBytes;
    }
    if (rest > 0) {
      // Rows go on with zeros; nothing need lie behind a panel.
      alignas(64) uint8_t last[kSteps * kStepBytes] = {};
      std::memcpy(last, panel, static_cast<size_t>(rest * kStepBytes));
      multiply_block<ByteProduct>(a, tile.a_stride, last, starts);
    }
    store_sums(tile.c, kSumStride, starts);
  }
};

void run(const Int8Tile& tile) { by_hold<Multiply>(tile); }

}  // namespace

constinit const Int8Kernel kAmxInt8{
    .name = "amx_int8",
    .run = run,
    .divide = divide_avx512,
    .cut = {.max_rows = kMaxRows, .full_rows = kTwoTiles, .row_blocks = true, .best_k = 512, .passing_k = 1024},
    .release = release};
}  // namespace sgl_batch
#endif
