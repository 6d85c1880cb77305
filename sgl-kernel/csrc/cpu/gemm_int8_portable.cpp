// The int8 kernel for any machine: what the compiler makes of plain loops.
#include "gemm_int8_rows.h"

namespace sgl_batch {
namespace {

constexpr int kRows = 4;

template <int M>
struct TilePlain {
  static void run(const Int8Tile& tile) {
    uint32_t sums[M][kPanel] = {};  // of int32 it would not be defined what lies beyond the ends
    for (int64_t step = 0; step < tile.steps; ++step) {
      const uint8_t* b = tile.panel + step * kStepBytes;
      for (int i = 0; i < M; ++i) {
        const int8_t* a = tile.a + i * tile.a_stride + step * kQuad;
        for (int j = 0; j < kPanel; ++j)
          for (int k = 0; k < kQuad; ++k) sums[i][j] += static_cast<uint32_t>(a[k] * b[j * kQuad + k]);
      }
    }
    __builtin_memcpy(tile.c, sums, sizeof sums);
  }
};

}  // namespace

constinit const Int8Kernel kPortableInt8{
    .name = "portable", .run = by_rows<TilePlain, kRows>, .divide = divide_plainly, .cut = {.max_rows = kRows}};
}  // namespace sgl_batch
