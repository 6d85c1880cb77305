// The kernels for AVX512 without bf16 instructions: a bf16 weight is widened in a register.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#include "gemm_vector.h"

namespace sgl_batch {
const Isa kAvx512{"avx512", kRows, false, by_rows<TileBf16, kRows>, by_rows<TileF32, kRows>, store_rows, silu_mul, softmax_step, norm_row, rotate_head};
}
#endif
