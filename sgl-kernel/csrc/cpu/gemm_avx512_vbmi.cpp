// The tiles of fp8 for AVX512 with tables of bytes. Where a block of a panel has one scale, a code stands for one number of bf16: its
// two bytes are found in tables by the seven bits of its magnitude.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,fma")
#include <immintrin.h>

#define SGL_BATCH_LANES 16
#define SGL_BATCH_ROWS 12
#define SGL_BATCH_TO_BF16(value) _mm512_cvtneps_pbh((__m512)(value))
#define SGL_BATCH_TWO_TO_BF16(first, second) _mm512_cvtne2ps_pbh((__m512)(second), (__m512)(first))
#include "coded_pairs.h"
#include "coded_widened.h"
#include "grouped_tile_avx512.h"

namespace sgl_batch {
namespace {

constexpr int kMagnitudes = 128;

// The numbers of a block with one scale.
struct Fp8Table {
  explicit Fp8Table(float scale) {
    const __m512 scales = _mm512_set1_ps(scale);
    const __m512i first = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), kToF32);
    for (int half = 0; half < 2; ++half) {
      __m256i low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        const int magnitude = half * kMagnitudes / 2 + i * 2 * kLanes;
        const __m512i codes = _mm512_add_epi32(first, _mm512_set1_epi32(magnitude << kToF32));
        const __m512 lesser = _mm512_mul_ps((__m512)codes, scales);
        const __m512 larger = _mm512_mul_ps((__m512)_mm512_add_epi32(codes, _mm512_set1_epi32(kLanes << kToF32)), scales);
        const auto numbers = (__m512i)_mm512_cvtne2ps_pbh(larger, lesser);
        low[i] = _mm512_cvtepi16_epi8(numbers);
        high[i] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(numbers, 8));
      }
      lower[half] = _mm512_inserti64x4(_mm512_castsi256_si512(low[0]), low[1], 1);
      upper[half] = _mm512_inserti64x4(_mm512_castsi256_si512(high[0]), high[1], 1);
    }
  }
  [[gnu::always_inline]] void all(const void* from, VecW (&weights)[4]) const {
    const auto* lines = static_cast<const char*>(from);
    const __m512i sign = _mm512_set1_epi8(-0x80);
#pragma GCC unroll 2
    for (int line = 0; line < 2; ++line) {
      const __m512i codes = _mm512_loadu_si512(lines + line * kLineBytes);
      const __m512i low = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
      const __m512i high = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);
      const __m512i with_sign = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8);  // high | (codes & sign)
      weights[2 * line] = (VecW)_mm512_unpacklo_epi8(low, with_sign);
      weights[2 * line + 1] = (VecW)_mm512_unpackhi_epi8(low, with_sign);
    }
  }

  static constexpr int kToF32 = 20;  // where f32 has a code's magnitude
  __m512i lower[2], upper[2];
};

// The numbers of a block whose columns have scales of their own. Codes come to lie so that what is scaled is rounded in order: of
// a group's numbers the first half is in the lower words of lanes, the second in the upper ones.
struct Fp8ByColumns {
  explicit Fp8ByColumns(const float* given) {
    alignas(64) uint8_t orders[2][64] = {};
    for (int group = 0; group < 2; ++group) {
      for (int word = 0; word < kWords; ++word) {
        const int number = word / 2 + word % 2 * kLanes;
        orders[group][2 * word + 1] = static_cast<uint8_t>(number / 8 * 16 + group * 8 + number % 8);
      }
      order[group] = _mm512_load_si512(orders[group]);
      for (int part = 0; part < 2; ++part) scales[group][part] = twice(load(given + group * kLanes), part);
    }
  }
  [[gnu::always_inline]] void all(const void* from, VecW (&weights)[4]) const {
    constexpr __mmask64 kUpper = 0xaaaaaaaaaaaaaaaa;
    const auto* lines = static_cast<const char*>(from);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i codes = _mm512_loadu_si512(lines + i / 2 * kLineBytes);
      const VecU placed = fp8_placed((VecW)_mm512_maskz_permutexvar_epi8(kUpper, order[i % 2], codes));
      weights[i] = two_to_bf16(fp8_even(placed) * scales[i % 2][0], fp8_odd(placed) * scales[i % 2][1]);
    }
  }

  __m512i order[2];
  VecF scales[2][2];
};

bool have_one_scale(const float* scales) {
  const __m512i first = _mm512_set1_epi32(*reinterpret_cast<const int*>(scales));
  const __mmask16 others = _mm512_cmpneq_epi32_mask(first, _mm512_loadu_si512(scales));
  return (others | _mm512_cmpneq_epi32_mask(first, _mm512_loadu_si512(scales + kLanes))) == 0;
}

struct BlockOfTables {
  template <typename Each>
  [[gnu::always_inline]] static void call(const float* scales, const Each& each) {
    if (have_one_scale(scales))
      each(Fp8Table(*scales));
    else
      each(Fp8ByColumns(scales));
  }
};
using PanelOfFp8Tables = PanelOfScaled<float, kFp8Lines, BlockOfTables>;

void decode_fp8_by_tables(const float* scales, const void* codes, int64_t k, int64_t group, uint16_t* to) {
  const auto* from = static_cast<const char*>(codes);
  for (int64_t first = 0; first < k; first += group, scales += kPanel) {
    const int64_t count = k - first < group ? k - first : group;
    BlockOfTables::call(scales, [&](const auto& numbers) {
      for (int64_t i = 0; i < count; i += kGroupedWordK, from += kFp8Lines * kLineBytes, to += kGroupedWordK * kPanel) {
        VecW weights[4];
        numbers.all(from, weights);
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) store_words(to + part * kPanel, weights[part]);
      }
    });
  }
}

template <int M>
struct TileFp8Pairs : TileGrouped<CodedPairs, PanelOfFp8Tables, M> {};
template <int M>
struct TileFp8Widened : TileGrouped<CodedWidened, PanelOfFp8Tables, M> {};

}  // namespace

constinit const Fp8Tables kFp8Avx512Vbmi{.run = by_rows<TileFp8Pairs, kRows>, .run_widened = by_rows<TileFp8Widened, kRows>,
                                         .decode = decode_fp8_by_tables};
}  // namespace sgl_batch
#endif
