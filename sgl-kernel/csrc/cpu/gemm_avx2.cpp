// The kernels for AVX2 with FMA: 16 registers, so five rows of two vectors.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define SGL_BATCH_LANES 8
#define SGL_BATCH_ROWS 5
#include "gemm_vector.h"

namespace sgl_batch {
constinit const Isa kAvx2 = isa_with("avx2", false, widening_kernel());
}
#endif
