// The kernels for AVX2 with FMA: 16 registers, so five rows of two vectors.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define SGL_BATCH_LANES 8
#define SGL_BATCH_ROWS 5
#include "gemm_vector.h"

namespace sgl_batch {
const Isa kAvx2{"avx2", kRows, false, by_rows<TileBf16, kRows>, by_rows<TileF32, kRows>, store_rows, silu_mul, softmax_step, norm_row, rotate_head};
}
#endif
