// Owns the packed form of int8 weights that meet int8 rows (gemm_int8.h): made in place, and made ready for a tile.
#pragma once

#include <cstdint>

#include "gemm_int8.h"

namespace sgl_batch {

// Pack one plain matrix [N, K] in place, or back. `scratch` holds kPanel * K bytes.
void pack_quads(int8_t* matrix, int64_t n, int64_t k, int8_t* scratch);
void unpack_quads(int8_t* matrix, int64_t n, int64_t k, int8_t* scratch);

inline int64_t quad_steps(int64_t k) { return (k + kQuad - 1) / kQuad; }

// A packed matrix [n, k], with a scale for each of its n outputs.
struct PackedInt8 {
  const uint8_t* data;
  const float* scales;
  int64_t n, k;

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return kPanel * k; }
  const uint8_t* panel(int64_t index) const { return data + index * panel_bytes(); }
  int64_t width(int64_t index) const { return n - index * kPanel < kPanel ? n - index * kPanel : kPanel; }

  // The panel with its full width and whole steps: itself, or a copy in `spare`, of spare_bytes().
  size_t spare_bytes() const { return static_cast<size_t>(quad_steps(k) * kStepBytes); }
  const uint8_t* ready(int64_t index, uint8_t* spare) const;
};

}  // namespace sgl_batch
