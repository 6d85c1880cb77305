// The kernels of latent attention for AVX2 with FMA: 16 registers, so tiles of eight.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define SGL_BATCH_LANES 8
#define SGL_BATCH_MLA_TILE 8
#include "attention_mla_vector.h"

namespace sgl_batch {
const MlaKernels kMlaAvx2{kLanes,      kTile,   keys_tile<F32Word>, values_tile<F32Word>,
                              softmax_f32, nullptr, nullptr,            nullptr,
                              nullptr};
}
#endif
