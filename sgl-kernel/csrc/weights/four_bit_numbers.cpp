// Owns the order of four-bit numbers in files and in panels: see four_bit_numbers.h, ../cpu/int4.h and ../cpu/fp4.h.
#include "four_bit_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../cpu/byte_pairs.h"
#include "../cpu/clones.h"

namespace sgl_batch {
namespace {

constexpr int64_t kPerWord = 8, kFourK = 4;
constexpr int64_t kFourBytes = kPanel * 2;  // of four k of a panel
constexpr uint32_t kEven = 0x0f0f, kOdd = 0xf0f0;
constexpr int kAwqOrder[kPerWord] = {0, 4, 1, 5, 2, 6, 3, 7};  // where a word has its outputs

// What each column of a panel has of four k: four bits each, the first k lowest.
using Fours = uint16_t[kPanel];

// To the words of four k of int4.
inline __attribute__((always_inline)) void put_fours(const Fours& fours, char* to) {
  constexpr int kHalf = kPanel / 2, kQuarter = kPanel / 4;
  uint16_t words[kPanel];
  for (int c = 0; c < kQuarter; ++c)
    for (int half = 0; half < 2; ++half) {
      const uint32_t left = fours[c + half * kQuarter], right = fours[c + half * kQuarter + kHalf];
      words[4 * c + half] = static_cast<uint16_t>((left & kEven) | (right & kEven) << 4);
      words[4 * c + 2 + half] = static_cast<uint16_t>((left >> 4 & kEven) | (right & kOdd));
    }
  std::memcpy(to, words, sizeof(words));
}

// To those of fp4.
void put_fp4_fours(const Fours& fours, char* to) {
  constexpr int kHalf = kPanel / 2;
  uint16_t words[kPanel];
  for (int c = 0; c < kHalf; ++c) {
    const uint32_t left = fours[c], right = fours[c + kHalf];
    words[2 * c] = static_cast<uint16_t>((left & kEven) | (right & kEven) << 4);
    words[2 * c + 1] = static_cast<uint16_t>((left >> 4 & kEven) | (right & kOdd));
  }
  std::memcpy(to, words, sizeof(words));
}

// An infinity for what is no number, too.
float f16_to_f32(uint16_t bits) {
  constexpr uint32_t kMagnitude = 0x7fff, kNoNumbers = 0x7c00;
  constexpr float kBiases = 0x1p112f;  // of the exponents of f32 and f16
  const uint32_t magnitude = bits & kMagnitude;
  if (magnitude >= kNoNumbers) return std::numeric_limits<float>::infinity();
  const float number = __builtin_bit_cast(float, magnitude << 13) * kBiases;
  return bits > kMagnitude ? -number : number;
}

// A panel's words of four k from `k` on.
char* fours_of(char* packed, DType dtype, int64_t panel, int64_t width, int64_t k) {
  char* const begin = packed + packed_bytes(dtype, panel * kPanel * width) + int4_scale_bytes(width, int4_group(dtype));
  return begin + k / kFourK * kFourBytes;
}

// kPanel rows of k, put(fours, where) each four of them.
template <typename Put>
void put_rows(const Rows& rows, int64_t k, char* to, const Put& put) {
  constexpr int64_t kAtOnce = kPairsAtOnce;
  for (int64_t first = 0; first < k / kFourK; first += kAtOnce) {
    Pairs8 columns[kPanel / kPairsAtOnce][kPairsAtOnce];
    for (int64_t part = 0; part < kPanel / kPairsAtOnce; ++part) {
      for (int64_t i = 0; i < kPairsAtOnce; ++i)
        std::memcpy(&columns[part][i], rows.first + (part * kPairsAtOnce + i) * rows.stride + first * 2, sizeof(Pairs8));
      transpose_pairs(columns[part]);
    }
    for (int64_t i = 0; i < kAtOnce; ++i) {
      Fours fours;
      for (int64_t part = 0; part < kPanel / kPairsAtOnce; ++part)
        std::memcpy(fours + part * kPairsAtOnce, &columns[part][i], sizeof(Pairs8));
      put(fours, to + (first + i) * kFourBytes);
    }
  }
}

// Rows of words of eight k, `stride` words apart, of one panel.
SGL_BATCH_CLONES void put_gptq_rows(const uint32_t* words, int64_t stride, int64_t rows, char* to) {
  for (int64_t row = 0; row < rows; ++row, words += stride, to += 2 * kFourBytes) {
    Fours low, high;
    for (int column = 0; column < kPanel; ++column) {
      low[column] = static_cast<uint16_t>(words[column]);
      high[column] = static_cast<uint16_t>(words[column] >> 16);
    }
    put_fours(low, to);
    put_fours(high, to + kFourBytes);
  }
}

// Rows of words of eight outputs, likewise; four at a time. A word has its outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
SGL_BATCH_CLONES void put_awq_rows(const char* from, int64_t stride, int64_t rows, char* to) {
  using Bytes = uint8_t __attribute__((vector_size(16)));
  static_assert(sizeof(Bytes) == kPanel / 2);
  constexpr Bytes kLower = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  constexpr Pairs8 kFirst = {0, 2, 8, 10, 1, 3, 9, 11};
  for (int64_t row = 0; row < rows; row += kFourK, from += kFourK * stride, to += kFourBytes) {
    Bytes a, b, c, d;
    std::memcpy(&a, from, sizeof(a));
    std::memcpy(&b, from + stride, sizeof(b));
    std::memcpy(&c, from + 2 * stride, sizeof(c));
    std::memcpy(&d, from + 3 * stride, sizeof(d));
    // A byte's lower number of each row, and its upper one, of two rows side by side.
    const Bytes ab = (a & 15) | (b << 4), cd = (c & 15) | (d << 4), upper_ab = (a >> 4) | (b & 0xf0), upper_cd = (c >> 4) | (d & 0xf0);
    Fours fours;
    for (int half = 0; half < 2; ++half) {
      const Bytes order = kLower + static_cast<uint8_t>(8 * half);
      const auto lower = reinterpret_cast<Pairs8>(__builtin_shuffle(ab, cd, order));
      const auto upper = reinterpret_cast<Pairs8>(__builtin_shuffle(upper_ab, upper_cd, order));
      for (uint16_t word = 0; word < 2; ++word) {
        const Pairs8 outputs = __builtin_shuffle(lower, upper, kFirst + static_cast<uint16_t>(4 * word));
        std::memcpy(fours + (2 * half + word) * kPerWord, &outputs, sizeof(outputs));
      }
    }
    put_fours(fours, to);
  }
}

}  // namespace

int64_t FourBitNumbers::row_bytes(int64_t n, int64_t k) const {
  switch (layout) {
    case FourBitLayout::kRows:
    case FourBitLayout::kMxfp4: return k / 2;
    case FourBitLayout::kGptq: return n * 4;
    case FourBitLayout::kAwq: return n / 2;
  }
  return 0;
}

int64_t FourBitNumbers::rows(int64_t n, int64_t k) const {
  return layout == FourBitLayout::kRows ? n : layout == FourBitLayout::kGptq ? k / kPerWord : k;
}

int64_t FourBitNumbers::rows_together() const {
  return layout == FourBitLayout::kRows ? kPanel : layout == FourBitLayout::kGptq ? 1 : kFourK;
}

const char* put_words(const FourBitNumbers& stored, const char* scales, const char* zeros, int64_t n, int64_t k, DType dtype,
                      char* packed) {
  const int64_t own_group = int4_group(dtype), groups = stored.groups(k), repeats = k / groups / own_group;
  const auto* const half = reinterpret_cast<const uint16_t*>(scales);
  const auto* const words = reinterpret_cast<const uint32_t*>(zeros);
  const bool by_row = stored.layout == FourBitLayout::kRows;
  int64_t large = 0;
  bool finite = true;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t output = 0; output < n; ++output) {
      const uint16_t bits = half[by_row ? output * groups + group : group * n + output];
      const float scale = stored.bf16_scales ? bf16_to_f32(bits) : f16_to_f32(bits);
      int64_t zero = 8;
      if (stored.has_zeros) {
        const uint32_t word = words[by_row ? output / kPerWord * groups + group : (group * n + output) / kPerWord];
        const int64_t place = output % kPerWord;
        zero = (word >> 4 * (stored.layout == FourBitLayout::kAwq ? kAwqOrder[place] : place) & 15) + stored.zero_lack;
      }
      large |= zero & ~static_cast<int64_t>(kInt4Zero);
      finite &= std::isfinite(scale);
      const uint32_t word = (__builtin_bit_cast(uint32_t, scale) & kInt4Scale) | (static_cast<uint32_t>(zero) & kInt4Zero);
      char* const panel = packed + packed_bytes(dtype, output / kPanel * kPanel * k);
      for (int64_t again = 0; again < repeats; ++again)
        std::memcpy(panel + (((group * repeats + again) * kPanel) + output % kPanel) * 4, &word, 4);
    }
  if (!finite) return "scales that are infinite or no numbers";
  return large == 0 ? nullptr : "zero points above 15, which streamed integers of 4 bits do not have";
}

void put_integers(const FourBitNumbers& stored, const char* from, int64_t first, int64_t rows, int64_t n, int64_t k, DType dtype,
                  char* packed) {
  const int64_t panels = n / kPanel;
  const auto* const words = reinterpret_cast<const uint32_t*>(from);
  switch (stored.layout) {
    case FourBitLayout::kRows:
      for (int64_t row = 0; row < rows; row += kPanel)
        put_rows({reinterpret_cast<const uint8_t*>(from) + row * (k / 2), k / 2}, k, fours_of(packed, dtype, (first + row) / kPanel, k, 0),
                 put_fours);
      return;
    case FourBitLayout::kMxfp4: return;  // no integers
    case FourBitLayout::kGptq:
      for (int64_t panel = 0; panel < panels; ++panel)
        put_gptq_rows(words + panel * kPanel, n, rows, fours_of(packed, dtype, panel, k, first * kPerWord));
      return;
    case FourBitLayout::kAwq:
      for (int64_t panel = 0; panel < panels; ++panel)
        put_awq_rows(from + panel * kPanel / 2, n / 2, rows, fours_of(packed, dtype, panel, k, first));
      return;
  }
}

bool pack_mxfp4_rows(const Rows& numbers, const Rows& powers, int64_t k, char* panel) {
  constexpr int kLeastPower = 2;
  constexpr int64_t kBlockBytes = kFp4BlockK / 2;
  auto* to = reinterpret_cast<uint8_t*>(panel);
  for (int64_t block = 0; block < k / kFp4BlockK; ++block)
    for (int64_t column = 0; column < kPanel; ++column) {
      int power = powers.first[column * powers.stride + block];
      if (power < kLeastPower || power > kFp4MostPower) {
        const uint8_t* own = numbers.first + column * numbers.stride + block * kBlockBytes;
        if (std::any_of(own, own + kBlockBytes, [](uint8_t two) { return (two & 0x77) != 0; })) return false;
        power = kFp4Bias;  // of zeros any
      }
      *to++ = static_cast<uint8_t>(power);
    }
  put_rows(numbers, k, panel + fp4_power_bytes(k), put_fp4_fours);
  return true;
}

}  // namespace sgl_batch
