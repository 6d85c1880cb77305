// The kernels of latent attention for any machine: what the compiler makes of them without further instruction sets.
#define SGL_BATCH_LANES 4
#define SGL_BATCH_MLA_TILE 8
#include "attention_mla_vector.h"

namespace sgl_batch {
const MlaKernels kMlaPortable{kF32Width<1>, kF32Width<2>, pack_lanes, unpack_lanes, nullptr};
}
