// The kernels of latent attention for any machine: what the compiler makes of them without further instruction sets.
#define SGL_BATCH_LANES 4
#define SGL_BATCH_MLA_TILE 8
#include "attention_mla_vector.h"

namespace sgl_batch {
const MlaKernels kMlaPortable{kLanes,      kTile,   keys_tile<F32Word>, values_tile<F32Word>,
                              softmax_f32, nullptr, nullptr,            nullptr,
                              nullptr};
}
