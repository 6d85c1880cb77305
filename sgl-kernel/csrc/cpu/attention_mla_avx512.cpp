// The kernels of latent attention for AVX512 without bf16 instructions: bf16 is widened before.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#define SGL_BATCH_LANES 16
#define SGL_BATCH_MLA_TILE 16
#include "attention_mla_vector.h"

namespace sgl_batch {
const MlaKernels kMlaAvx512{kF32Width<1>, kF32Width<2>, pack_lanes, unpack_lanes, nullptr};
}
#endif
