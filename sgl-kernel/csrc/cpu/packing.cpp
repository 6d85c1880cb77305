#include "packing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "clones.h"
#include "coded.h"
#include "fp4.h"
#include "fp8.h"
#include "int4.h"
#include "int8_groups.h"
#include "rows.h"

namespace sgl_batch {
namespace {

constexpr int64_t kStepsAtOnce = 16;  // of a panel: what is read of each row is a cache line or two
// A panel that takes more bytes when it is widened to f32 stays as it lies: beside rows the second cache has no room for it.
constexpr int64_t kMostKeptBytes = 512 << 10;
constexpr float kLargestI8 = 127.0f;

// A panel is an array of words: a pair of bf16 or int8 along k, or one f32.
void pack_panel(const uint32_t* from, uint32_t* to, int64_t width, int64_t steps) {
  isa().transpose_words(from, steps * 4, width, steps, to, width * 4);
}
void unpack_panel(const uint32_t* from, uint32_t* to, int64_t width, int64_t steps) {
  isa().transpose_words(from, width * 4, steps, width, to, steps * 4);
}
// Two columns side by side are a word of 4 bytes.
void pack_pairs_of_columns(const uint16_t* from, uint16_t* to, int64_t steps) {
  constexpr int64_t kPairs = kPanel / 2, kSteps = 4 * kStepsAtOnce;
  uint32_t pairs[kPairs * kSteps];
  for (int64_t first = 0; first < steps; first += kSteps) {
    const int64_t count = std::min(kSteps, steps - first);
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      const uint16_t* even = from + 2 * pair * steps + first;
      isa().zip_halves(even, even + steps, count, reinterpret_cast<uint16_t*>(pairs + pair * kSteps));
    }
    isa().transpose_words(pairs, kSteps * 4, kPairs, count, to + first * kPanel, kPanel * 2);
  }
}

void pack_panel(const uint16_t* from, uint16_t* to, int64_t width, int64_t steps) {
  if (width == kPanel) return pack_pairs_of_columns(from, to, steps);
  for (int64_t first = 0; first < steps; first += kStepsAtOnce) {
    const int64_t last = std::min(first + kStepsAtOnce, steps);
    for (int64_t column = 0; column < width; ++column)
      for (int64_t step = first; step < last; ++step) to[step * width + column] = from[column * steps + step];
  }
}
void unpack_panel(const uint16_t* from, uint16_t* to, int64_t width, int64_t steps) {
  for (int64_t column = 0; column < width; ++column)
    for (int64_t step = 0; step < steps; ++step) to[column * steps + step] = from[step * width + column];
}

// A panel of full width. Its rows are more streams than a core foresees: the bytes behind it are asked for while it is read.
void pack_and_fetch_next(const uint32_t* from, int64_t steps, uint32_t* to) {
  constexpr int64_t kLine = kLineBytes / sizeof(uint32_t);
  const uint32_t* next = from + kPanel * steps;
  for (int64_t first = 0; first < steps; first += kStepsAtOnce) {
    const int64_t count = std::min(kStepsAtOnce, steps - first);
    for (int64_t word = 0; word < kPanel * count; word += kLine) __builtin_prefetch(next + first * kPanel + word, 0, 2);
    isa().transpose_words(from + first, steps * 4, kPanel, count, to + first * kPanel, kPanel * 4);
  }
}

template <typename Word>
void pack_panels(const void* plain, int64_t rows, int64_t steps, void* packed) {
  for (int64_t first = 0; first < rows; first += kPanel)
    pack_panel(static_cast<const Word*>(plain) + first * steps, static_cast<Word*>(packed) + first * steps,
               std::min<int64_t>(kPanel, rows - first), steps);
}

// The largest bits of numbers without their signs, which are those of the largest number, or of a NaN if there is one.
SGL_BATCH_CLONES float largest_of(const float* row, int64_t k) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(row[i]) & 0x7fffffffu);
  return std::bit_cast<float>(largest);
}

// One row to int8; returns its scale.
SGL_BATCH_CLONES float round_row(const float* row, int64_t k, int8_t* to) {
  const float share = largest_of(row, k) / kLargestI8;
  if (!std::isfinite(share)) {  // then so are all products with the row
    std::memset(to, 0, static_cast<size_t>(k));
    return share;
  }
  // Of numbers so small that their scale would be nothing, too, nothing is left.
  const float scale = share == 0.0f ? 1.0f : share;
  for (int64_t i = 0; i < k; ++i)
    to[i] = static_cast<int8_t>(std::clamp(std::nearbyint(row[i] / scale), -kLargestI8, kLargestI8));
  return scale;
}

template <typename Word, typename Move>
void each_panel(void* matrix, int64_t n, int64_t steps, void* scratch, Move move) {
  auto* words = static_cast<Word*>(matrix);
  auto* copy = static_cast<Word*>(scratch);
  for (int64_t first = 0; first < n; first += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, n - first);
    Word* panel = words + first * steps;
    std::memcpy(copy, panel, static_cast<size_t>(width * steps) * sizeof(Word));
    move(copy, panel, width, steps);
  }
}

template <typename Word>
void pack_words(void* matrix, int64_t n, int64_t steps, void* scratch) {
  each_panel<Word>(matrix, n, steps, scratch, [](const Word* from, Word* to, int64_t width, int64_t count) {
    pack_panel(from, to, width, count);
  });
}

template <typename Word>
void unpack_words(void* matrix, int64_t n, int64_t steps, void* scratch) {
  each_panel<Word>(matrix, n, steps, scratch, [](const Word* from, Word* to, int64_t width, int64_t count) {
    unpack_panel(from, to, width, count);
  });
}

// `to` may end where `from` does.
template <typename Word>
void pad_words(const void* from, int64_t width, int64_t steps, void* to) {
  const auto* words = static_cast<const Word*>(from);
  auto* padded = static_cast<Word*>(to);
  for (int64_t step = 0; step < steps; ++step) {
    std::memmove(padded + step * kPanel, words + step * width, static_cast<size_t>(width) * sizeof(Word));
    std::memset(padded + step * kPanel + width, 0, static_cast<size_t>(kPanel - width) * sizeof(Word));
  }
}

// The tile that takes panels whose groups share scales as they lie; null where they are decoded before.
TileFn grouped_tile(const TileKernel& tile, DType dtype) {
  if (dtype == DType::kFp4) return tile.run_fp4;
  if (int4_group(dtype) > 0) return tile.run_int4;
  return fp8_group(dtype) > 0 ? tile.run_fp8 : tile.run_int8_groups;
}

void decode_grouped_panel(const Isa& isa, DType dtype, const void* panel, int64_t k, void* to) {
  if (dtype == DType::kFp4) return decode_fp4_panel(isa, panel, k, to);
  if (const int64_t group = int4_group(dtype); group > 0) return decode_int4_panel(isa, panel, k, group, to);
  if (const int64_t group = fp8_group(dtype); group > 0) return decode_fp8_panel(isa, panel, k, group, to);
  decode_int8_panel(isa, panel, k, int8_group(dtype), to);
}

}  // namespace

void pack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch) {
  if (dtype == DType::kI8)
    pack_words<uint16_t>(matrix, n, k / 2, scratch);
  else
    pack_words<uint32_t>(matrix, n, dtype == DType::kBf16 ? k / 2 : k, scratch);
}

float round_row(const void* row, DType dtype, int64_t k, float* exact, int8_t* to) {
  read_row(exact, row, dtype, k);
  return round_row(exact, k, to);
}

uint8_t pack_and_code(void* panel, int64_t k, void* scratch) {
  const size_t num_bytes = sizeof(uint16_t) * kPanel * static_cast<size_t>(k);
  pack_and_fetch_next(static_cast<const uint32_t*>(panel), k / 2, static_cast<uint32_t*>(scratch));
  const uint8_t mark = code_panel(scratch, k, panel);
  if (mark == 0) std::memcpy(panel, scratch, num_bytes);
  return mark;
}

void unpack_matrix(void* matrix, int64_t n, int64_t k, DType dtype, void* scratch) {
  if (dtype == DType::kI8)
    unpack_words<uint16_t>(matrix, n, k / 2, scratch);
  else
    unpack_words<uint32_t>(matrix, n, dtype == DType::kBf16 ? k / 2 : k, scratch);
}

void pack_rows(const void* plain, DType from, int64_t rows, int64_t k, void* packed, DType to, float* scales) {
  if (to == DType::kF32) return pack_panels<uint32_t>(plain, rows, k, packed);
  if (to == DType::kBf16) return pack_panels<uint32_t>(plain, rows, k / 2, packed);
  std::vector<int8_t> rounded(static_cast<size_t>(kPanel * k));
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t first = 0; first < rows; first += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, rows - first);
    for (int64_t column = 0; column < width; ++column) {
      const char* at = static_cast<const char*>(plain) + (first + column) * k * static_cast<int64_t>(size_of(from));
      scales[first + column] = round_row(at, from, k, row.data(), rounded.data() + column * k);
    }
    pack_panels<uint16_t>(rounded.data(), width, k / 2, static_cast<char*>(packed) + first * k);
  }
}

ReadyPanel PackedWeight::ready(int64_t index, const Isa& isa, void* spare, int64_t tiles) const {
  const int columns = width(index);
  const TileKernel& tile = isa.tile(dtype);
  const int64_t wide = kPanel * static_cast<int64_t>(size_of(tile_dtype(dtype)));
  const int64_t kept = kPanel * static_cast<int64_t>(size_of(isa.row_dtype(dtype)));
  const bool keeps = tiles > 1 && tile.run_kept != nullptr && !tile.cut.cuts_k(tiles);
  const bool widens = keeps && kept > wide && kept * k <= kMostKeptBytes && columns == kPanel;
  if (marks != nullptr && marks[index] != 0) {
    if (tile.run_coded != nullptr && !tile.cut.cuts_k(tiles))
      return {panel(index), tile.run_coded, 0, marks[index] - 1u, keeps ? spare : nullptr, tile.run_kept, kept};
    decode_panel(isa, panel(index), k, marks[index], spare);
    return {spare, tile.run, wide};
  }
  if (has_groups(dtype)) {
    const TileFn run = grouped_tile(tile, dtype);
    if (run != nullptr && !tile.cut.cuts_k(tiles)) {
      const auto group = static_cast<uint32_t>(int4_group(dtype) + fp8_group(dtype) + int8_group(dtype));
      return {panel(index), run, 0, group, keeps ? spare : nullptr, tile.run_kept, kept};
    }
    decode_grouped_panel(isa, dtype, panel(index), k, spare);
    return {spare, tile.run, wide};
  }
  if (dtype == DType::kF32) return {ready_part(index, spare, 0, k), tile.run, wide};
  if (dtype == DType::kBf16) {
    if (widens) return {panel(index), tile.run, wide, 0, spare, tile.run_kept, kept};
    return {ready_part(index, spare, 0, k), tile.run, wide};
  }
  // Widening costs as much as a tile of few rows: it is done once where several tiles share it.
  if (widens || (tiles == 1 && columns == kPanel))
    return {panel(index), tile.run_i8, kPanel, 0, widens ? spare : nullptr, tile.run_kept, kept};
  // A narrow panel is widened as it is into the end of the full one, and spread out from there.
  auto* narrow = static_cast<uint16_t*>(spare) + (kPanel - columns) * k;
  isa.widen(reinterpret_cast<const int8_t*>(panel(index)), columns * k, narrow);
  if (columns < kPanel) pad_words<uint32_t>(narrow, columns, k / 2, spare);
  return {spare, isa.tile(dtype).run, wide};
}

const void* PackedWeight::padded_part(int64_t index, void* spare, int64_t first, int64_t last) const {
  const int columns = width(index);
  const char* at = panel(index) + first * columns * static_cast<int64_t>(size_of(dtype));
  pad_words<uint32_t>(at, columns, tile_steps(dtype, last - first), spare);
  return spare;
}

int64_t PackedWeight::filled_bytes() const { return marks == nullptr ? panel_bytes() : coded_bytes(k); }

void PackedWeight::scale(int64_t index, const Isa& isa, float* c, int64_t c_stride, int rows) const {
  if (scales == nullptr) return;
  const int columns = width(index);
  const float* own = scales + index * kPanel;
  if (columns == kPanel) return isa.scale_columns(c, c_stride, rows, own);
  float padded[kPanel] = {};
  std::copy(own, own + columns, padded);
  isa.scale_columns(c, c_stride, rows, padded);
}

}  // namespace sgl_batch
