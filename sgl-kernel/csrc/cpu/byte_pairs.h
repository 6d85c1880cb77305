// Owns how rows of bytes become a panel of bytes: pairs of neighbouring k, those of all columns side by side.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.h"

namespace sgl_batch {

// Pairs as words of 16 bits, in one register. The compiler has these vectors for every processor.
typedef uint16_t Pairs8 __attribute__((vector_size(16)));

constexpr int kPairsAtOnce = 8;

// The columns whose pairs lie side by side begin at `first` and, after four of them, at `second`.
struct PairColumns {
  int64_t first, second;
};

// Eight pairs of eight rows, to eight times one pair of each.
inline void transpose_pairs(Pairs8 (&rows)[kPairsAtOnce]) {
  using Pairs4 = uint32_t __attribute__((vector_size(16)));
  using Pairs2 = uint64_t __attribute__((vector_size(16)));
  Pairs4 fours[kPairsAtOnce];
  for (int i = 0; i < 4; ++i) {
    fours[2 * i] = reinterpret_cast<Pairs4>(__builtin_shuffle(rows[2 * i], rows[2 * i + 1], Pairs8{0, 8, 1, 9, 2, 10, 3, 11}));
    fours[2 * i + 1] = reinterpret_cast<Pairs4>(__builtin_shuffle(rows[2 * i], rows[2 * i + 1], Pairs8{4, 12, 5, 13, 6, 14, 7, 15}));
  }
  Pairs2 twos[kPairsAtOnce];
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 2; ++i) {
      const Pairs4 a = fours[4 * half + i], b = fours[4 * half + 2 + i];
      twos[4 * half + 2 * i] = reinterpret_cast<Pairs2>(__builtin_shuffle(a, b, Pairs4{0, 4, 1, 5}));
      twos[4 * half + 2 * i + 1] = reinterpret_cast<Pairs2>(__builtin_shuffle(a, b, Pairs4{2, 6, 3, 7}));
    }
  for (int i = 0; i < 4; ++i) {
    rows[2 * i] = reinterpret_cast<Pairs8>(__builtin_shuffle(twos[i], twos[4 + i], Pairs2{0, 2}));
    rows[2 * i + 1] = reinterpret_cast<Pairs8>(__builtin_shuffle(twos[i], twos[4 + i], Pairs2{1, 3}));
  }
}

// kPanel rows of k bytes, k a multiple of 16. `columns`: those of each eighth of a pair's 2 * kPanel bytes.
inline void panel_of_bytes(const uint8_t* rows, int64_t k, const PairColumns (&columns)[kPanel / kPairsAtOnce], uint8_t* to) {
  for (int64_t first = 0; first < k; first += 2 * kPairsAtOnce)
    for (int64_t part = 0; part < kPanel / kPairsAtOnce; ++part) {
      Pairs8 pairs[kPairsAtOnce];
      for (int64_t i = 0; i < kPairsAtOnce; ++i) {
        const int64_t column = i < 4 ? columns[part].first + i : columns[part].second + i - 4;
        std::memcpy(&pairs[i], rows + column * k + first, sizeof(Pairs8));
      }
      transpose_pairs(pairs);
      uint8_t* own = to + first * kPanel + part * static_cast<int64_t>(sizeof(Pairs8));
      for (int64_t i = 0; i < kPairsAtOnce; ++i) std::memcpy(own + i * 2 * kPanel, &pairs[i], sizeof(Pairs8));
    }
}

}  // namespace sgl_batch
