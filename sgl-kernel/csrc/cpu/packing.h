// Owns the packed form of weights: panels, made in place, and how they are made ready for a tile.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// Pack one plain matrix [N, K] in place, or back. `scratch` holds kPanel * K elements. bf16 and int8 need an even K.
void pack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch);
void unpack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch);

// Packs a plain panel of bf16, of full width, in place, and codes it; returns what code_panel does.
uint8_t pack_and_code(void* panel, int64_t k, void* scratch);

// Rounds a row of bf16 or f32 to int8, its largest number to 127, and returns its scale: 1 for a row of zeros. `exact`: scratch of
// k floats.
float round_row(const void* row, DType dtype, int64_t k, float* exact, int8_t* to);

// Packs rows of a plain matrix that begin with a panel and, but at its end, make whole ones; from bf16 or f32, also to int8,
// as round_row does.
void pack_rows(const void* plain, DType from, int64_t rows, int64_t k, void* packed, DType to, float* scales);

// A panel of full width, and the tile that takes it. The first tile may keep the numbers in `spare` for those that follow.
struct ReadyPanel {
  const void* data;
  TileFn tile;
  int64_t step;  // bytes of one k
  uint32_t base = 0;
  void* spare = nullptr;
  TileFn next_tile = nullptr;
  int64_t next_step = 0;
  bool rows_pass = false;  // see Tile

  const void* from(int64_t k) const { return static_cast<const char*>(data) + k * step; }
  // Runs a tile, whose panel is `from` some k, with what else it needs to know of the panel.
  void multiply(Tile one) {
    one.base = base, one.kept = spare, one.rows_pass = rows_pass;
    tile(one);
    if (spare != nullptr) *this = {spare, next_tile, next_step};
  }
};

// A packed matrix [n, k]. One of int8 has a scale for each of its n outputs, with which products are multiplied. One of coded
// panels has a mark for each, see coded.h.
struct PackedWeight {
  const void* data;
  DType dtype;
  const float* scales;
  int64_t n, k;
  const uint8_t* marks = nullptr;

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return packed_bytes(dtype, kPanel * k); }
  const char* panel(int64_t index) const { return static_cast<const char*>(data) + index * panel_bytes(); }
  int width(int64_t index) const { return static_cast<int>(n - index * kPanel < kPanel ? n - index * kPanel : kPanel); }

  // The panel with its full width: itself, or a copy in `spare`, of spare_bytes(), widened from int8 or decoded, and
  // padded with zeros. Of all k, for a number of tiles, or of [first, last), of a matrix that is not of int8.
  size_t spare_bytes(const Isa& isa) const { return size_of(isa.row_dtype(dtype)) * kPanel * static_cast<size_t>(k); }
  ReadyPanel ready(int64_t index, const Isa& isa, void* spare, int64_t tiles) const;
  const void* ready_part(int64_t index, void* spare, int64_t first, int64_t last) const {
    if (width(index) < kPanel) return padded_part(index, spare, first, last);
    return panel(index) + first * kPanel * static_cast<int64_t>(size_of(dtype));
  }
  const void* padded_part(int64_t index, void* spare, int64_t first, int64_t last) const;

  // What of a panel holds numbers.
  int64_t filled_bytes() const;

  // Multiplies rows of products with the given panel by the scales of its columns, where there are any.
  void scale(int64_t index, const Isa& isa, float* c, int64_t c_stride, int rows) const;
};

}  // namespace sgl_batch
