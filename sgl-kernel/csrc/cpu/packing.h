// Owns the packed form of weights: panels, made in place.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// Pack one plain matrix [N, K] in place, or back. `scratch` holds kPanel * K elements. bf16 needs an even K.
void pack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch);
void unpack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch);

// The panel with its full width: itself, or for the narrower last one a copy padded with zeros in `scratch`.
const void* full_panel(const void* packed, int64_t n, int64_t k, int64_t panel, DType dtype, void* scratch);

}  // namespace sgl_batch
