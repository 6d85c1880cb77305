// The kernels for AVX512 without bf16 instructions: a bf16 weight is widened in a register.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#include "gemm_vector.h"

namespace sgl_batch {
constinit const Isa kAvx512 = isa_with("avx512", false, kernel_of(by_rows<TileBf16, kRows>, by_rows<TileI8, kRows>));
}
#endif
