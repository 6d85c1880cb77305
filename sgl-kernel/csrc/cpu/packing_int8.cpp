#include "packing_int8.h"

#include <algorithm>
#include <cstring>

namespace sgl_batch {
namespace {

// Calls move(place in the plain panel [width, k], place in the packed one) for each number.
template <typename Move>
void each_number(int64_t width, int64_t k, Move move) {
  for (int64_t first = 0; first < k; first += kQuad) {
    const int64_t count = std::min(kQuad, k - first);
    for (int64_t column = 0; column < width; ++column)
      for (int64_t i = 0; i < count; ++i) move(column * k + first + i, first * width + column * count + i);
  }
}

// What is added goes around at the end of a byte: added again, it is taken back.
int8_t shifted(int8_t number) { return static_cast<int8_t>(static_cast<uint8_t>(number) ^ kUnsignedShift); }

// Calls move(from, to, width) for each panel and a copy of it.
template <typename Move>
void each_panel(int8_t* matrix, int64_t n, int64_t k, int8_t* scratch, Move move) {
  for (int64_t first = 0; first < n; first += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, n - first);
    int8_t* panel = matrix + first * k;
    std::memcpy(scratch, panel, static_cast<size_t>(width * k));
    move(scratch, panel, width);
  }
}

// Of full width, of whole quads, which are words of 4 bytes.
void pack_words(const int8_t* from, int64_t k, int8_t* to) {
  isa().transpose_words(from, k, kPanel, k / kQuad, to, kPanel * kQuad);
  for (int64_t i = 0; i < kPanel * k; ++i) to[i] = shifted(to[i]);
}

}  // namespace

void pack_quads(int8_t* matrix, int64_t n, int64_t k, int8_t* scratch) {
  each_panel(matrix, n, k, scratch, [k](const int8_t* from, int8_t* to, int64_t width) {
    if (width == kPanel && k % kQuad == 0) return pack_words(from, k, to);
    each_number(width, k, [&](int64_t plain, int64_t packed) { to[packed] = shifted(from[plain]); });
  });
}

void unpack_quads(int8_t* matrix, int64_t n, int64_t k, int8_t* scratch) {
  each_panel(matrix, n, k, scratch, [k](const int8_t* from, int8_t* to, int64_t width) {
    each_number(width, k, [&](int64_t plain, int64_t packed) { to[plain] = shifted(from[packed]); });
  });
}

const uint8_t* PackedInt8::ready(int64_t index, uint8_t* spare) const {
  const uint8_t* from = panel(index);
  const auto columns = static_cast<int64_t>(width(index)), rest = k % kQuad;
  if (columns == kPanel && rest == 0) return from;
  // What is left of the spare counts for nothing: rows are zero where k has ended, and no output is behind the width.
  std::memset(spare, 0, spare_bytes());
  const int64_t whole = k / kQuad;
  for (int64_t step = 0; step < whole; ++step)
    std::memcpy(spare + step * kStepBytes, from + step * columns * kQuad, static_cast<size_t>(columns * kQuad));
  for (int64_t column = 0; column < columns; ++column)
    std::memcpy(spare + whole * kStepBytes + column * kQuad, from + whole * columns * kQuad + column * rest,
                static_cast<size_t>(rest));
  return spare;
}

}  // namespace sgl_batch
