// The kernels for any machine: what the compiler makes of them without further instruction sets.
#define SGL_BATCH_LANES 4
#define SGL_BATCH_ROWS 4
#include "gemm_vector.h"

namespace sgl_batch {
const Isa kPortable{"portable", kRows, false, by_rows<TileBf16, kRows>, by_rows<TileF32, kRows>, store_rows, silu_mul, softmax_step, norm_row, rotate_head};
}
