// The kernels of latent attention for AVX2 with FMA: 16 registers, so eight accumulators.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define SGL_BATCH_LANES 8
#define SGL_BATCH_MLA_TILE 8
#include "attention_mla_vector.h"

namespace sgl_batch {
const MlaKernels kMlaAvx2{kF32Width<1>, kF32Width<2>, pack_lanes, unpack_lanes, nullptr};
}
#endif
