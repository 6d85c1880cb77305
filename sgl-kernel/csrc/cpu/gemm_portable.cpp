// The kernels for any machine: what the compiler makes of them without further instruction sets.
#define SGL_BATCH_LANES 4
#define SGL_BATCH_ROWS 4
#include "gemm_vector.h"

namespace sgl_batch {
constinit const Isa kPortable = isa_with("portable", false, widening_kernel());
}
