// Owns the checks of the AMX tile: against float64, a row's bits beside others and with a coded panel, what is read, what
// is written, what it leaves behind. On a processor without AMX its instructions are emulated; there alone accesses are checked row by row.
//
// Prints what executes the instructions, then a line for each rule that does not hold, and ends with 1 if there was one.
// With an argument it breaks a rule of the instructions, which the emulation must refuse.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "amx_emulation.h"
#include "amx_tiles.h"
#include "gemm.h"
#include "guarded_memory.h"
#include "packing.h"
#include "plain_decoding.h"

namespace sgl_batch {

// The tiles for panels of int8 and for coded ones take their widening and decoding from here, and packing its transposing. These need no AVX512.
constinit const Isa kAvx512Bf16{
    .name = "widening and decoding alone",
    .bf16_pairs = true,
    .tile_bf16 = {},
    .tile_f32 = {},
    .store = nullptr,
    .silu_mul = nullptr,
    .softmax_step = nullptr,
    .norm_row = nullptr,
    .rotate_head = nullptr,
    .widen =
        [](const int8_t* from, int64_t count, uint16_t* to) {
          for (int64_t i = 0; i < count; ++i) to[i] = f32_to_bf16(from[i]);
        },
    .decode = decode_plainly,
    .decode_fp4 = decode_fp4_plainly,
    .decode_int4 = decode_int4_plainly,
    .decode_fp8 = decode_bytes_plainly<unpack_fp8_panel>,
    .decode_int8_groups = decode_bytes_plainly<unpack_int8_panel>,
    .scale_columns = nullptr,
    .choose = nullptr,
    .transpose_words = transpose_plainly,
};

constinit const Fp8Tables kFp8Avx512Vbmi{.run = nullptr, .run_widened = nullptr, .decode = decode_bytes_plainly<unpack_fp8_panel>};

const Isa& isa() {
  static const Isa composed = [] {
    Isa isa = kAvx512Bf16;
    isa.tile_bf16 = kAmxBf16Tile;
    return isa;
  }();
  return composed;
}

}  // namespace sgl_batch

namespace {
using namespace sgl_batch;

enum class Weights { kNormal, kWhole, kI8 };  // whole numbers as bf16, and the same ones as int8

constexpr int kRows = kMaxRows;
constexpr int64_t kCStride = 40;  // of which kPanel are written
constexpr float kUntouched = -12345.0f;

int failures = 0;
bool emulated = false;

void expect(bool holds, const std::string& rule) {
  if (holds) return;
  ++failures;
  std::printf("does not hold: %s\n", rule.c_str());
}

// Rows, a panel and what sums begin with, of one k. Between rows lie NaN, behind the last one nothing.
struct Case {
  Case(int64_t depth, int64_t gap, bool adds, Weights weights = Weights::kNormal)
      : k(depth),
        stride(2 * depth + gap),
        add(adds),
        i8(weights == Weights::kI8),
        a(static_cast<size_t>((kRows - 1) * stride + 2 * k)),
        panel(static_cast<size_t>((i8 ? 1 : 2) * k * kPanel)),
        begin(kRows * kPanel) {
    std::mt19937 random(static_cast<unsigned>(k * 1000 + gap));
    std::normal_distribution<float> normal;
    for (int row = 0; row < kRows; ++row)
      for (int64_t i = 0; i < k; ++i) put(a.data() + row * stride, i, f32_to_bf16(normal(random)));
    for (int64_t i = 0; i < k * kPanel; ++i) {
      const auto whole = static_cast<int>(random() % 255) - 127;
      const float value = weights == Weights::kNormal ? normal(random) : static_cast<float>(whole);
      if (i8)
        panel.data()[i] = static_cast<char>(value);
      else
        put(panel.data(), i, f32_to_bf16(value));
    }
    for (float& value : begin) value = adds ? normal(random) : 0.0f;
  }

  static void put(char* to, int64_t index, uint16_t value) { memcpy(to + 2 * index, &value, 2); }
  static double get(const char* from, int64_t index) {
    uint16_t value;
    memcpy(&value, from + 2 * index, 2);
    return bf16_to_f32(value);
  }
  double left(int row, int64_t i) const { return get(a.data() + row * stride, i); }
  double right(int64_t i, int column) const {
    const int64_t at = (i / 2 * kPanel + column) * 2 + i % 2;
    return i8 ? static_cast<signed char>(panel.data()[at]) : get(panel.data(), at);
  }
  std::string name() const { return "k " + std::to_string(k) + (add ? ", added" : "") + (i8 ? ", int8" : ""); }

  int64_t k, stride;
  bool add, i8;
  Guarded a, panel;
  std::vector<float> begin;
};

// What a tile of rows [first, first + m) gives, with the numbers between its rows and after them.
std::vector<float> multiply(const Case& given, int first, int m, bool rows_pass = false) {
  const Guarded memory(sizeof(float) * static_cast<size_t>((m - 1) * kCStride + kPanel));
  auto* c = reinterpret_cast<float*>(memory.data());
  for (int row = 0; row < m; ++row) {
    for (int64_t i = 0; i < (row + 1 < m ? kCStride : kPanel); ++i) c[row * kCStride + i] = kUntouched;
    if (given.add) memcpy(c + row * kCStride, &given.begin[(first + row) * kPanel], sizeof(float) * kPanel);
  }
  const char* a = given.a.data() + first * given.stride;
  if (emulated) {
    amx_emulation::forget_allowed();
    for (int row = 0; row < m; ++row) amx_emulation::allow(a + row * given.stride, 2 * given.k, false);
    for (int row = 0; row < m; ++row) amx_emulation::allow(c + row * kCStride, sizeof(float) * kPanel, true);
    if (!given.i8) amx_emulation::allow(given.panel.data(), 2 * given.k * kPanel, false);
    constexpr size_t kScratch = 16384;  // the tile's own, below on the stack
    amx_emulation::allow(static_cast<const char*>(__builtin_frame_address(0)) - kScratch, kScratch, false);
  }
  Tile tile{a, given.stride, given.panel.data(), given.k, m, c, kCStride, given.add, {given.panel.data(), 7}};
  tile.rows_pass = rows_pass;
  (given.i8 ? kAmxBf16Tile.run_i8 : kAmxBf16Tile.run)(tile);
  if (emulated) amx_emulation::forget_allowed();
  return std::vector<float>(c, c + (m - 1) * kCStride + kPanel);
}

bool same(const float* a, const float* b) { return memcmp(a, b, sizeof(float) * kPanel) == 0; }

// Every row alone, within what 24 bits allow of the exact sum.
std::vector<std::vector<float>> check_rows_alone(const Case& given) {
  std::vector<std::vector<float>> rows;
  double worst = 0;
  for (int row = 0; row < kRows; ++row) {
    rows.push_back(multiply(given, row, 1));
    for (int column = 0; column < kPanel; ++column) {
      double sum = given.begin[row * kPanel + column], size = std::fabs(sum);
      for (int64_t i = 0; i < given.k; ++i) {
        sum += given.left(row, i) * given.right(i, column);
        size += std::fabs(given.left(row, i) * given.right(i, column));
      }
      const double error = std::fabs(rows[row][column] - sum) / size;
      if (!(error <= worst)) worst = error;  // NaN too
    }
  }
  expect(worst < 3e-7, given.name() + ": within rounding of float64, not " + std::to_string(worst * 1e7) + "e-7");
  return rows;
}

void check_case(const Case& given) {
  const auto alone = check_rows_alone(given);
  for (int m = 1; m <= kRows; ++m)
    for (const int first : {0, kRows - m}) {
      const auto found = multiply(given, first, m);
      bool own = true, untouched = true;
      for (int row = 0; row < m; ++row) {
        own = own && same(&found[row * kCStride], alone[first + row].data());
        if (row + 1 == m) continue;
        for (int64_t i = kPanel; i < kCStride; ++i) untouched = untouched && found[row * kCStride + i] == kUntouched;
      }
      const std::string name = given.name() + ", rows from " + std::to_string(first) + ": " + std::to_string(m);
      expect(own, name + ": a row's bits are those it has alone");
      expect(untouched, name + ": nothing is written beside the rows");
    }
}

// Tiles stay configured for 32 rows where a task has met as many; then, too, rows may pass.
void check_after_whole(const Case& given) {
  for (int m = 1; m <= kRows; ++m) {
    kAmxBf16Tile.release();
    const auto own = multiply(given, kRows - m, m);
    multiply(given, 0, 32);
    for (const bool pass : {false, true})
      expect(multiply(given, kRows - m, m, pass) == own, given.name() + ", " + std::to_string(m) + " rows after 32: the same bits");
  }
}

// The same rows by blocks of k, first over k below `cut`, then over the rest. Between blocks lie NaN.
std::vector<float> multiply_by_blocks(const Case& given, int m, int64_t cut) {
  const int64_t bytes = 2 * kBlockK, blocks = (given.k + kBlockK - 1) / kBlockK, block = m * bytes + 24;
  const Guarded rows(static_cast<size_t>((blocks - 1) * block + m * bytes));
  for (int row = 0; row < m; ++row)
    for (int64_t k = 0; k < given.k; ++k)
      memcpy(rows.data() + k / kBlockK * block + row * bytes + 2 * (k % kBlockK), given.a.data() + row * given.stride + 2 * k, 2);
  std::vector<float> c(given.begin.begin(), given.begin.begin() + m * kPanel);
  for (const auto& [from, to] : {std::pair<int64_t, int64_t>{0, cut}, {cut, given.k}})
    kAmxBf16Tile.run({rows.data() + from / kBlockK * block, bytes, given.panel.data() + 2 * from * kPanel, to - from, m, c.data(),
                      kPanel, given.add || from > 0, {given.panel.data(), 7}, block});
  return c;
}

void check_blocks(const Case& given) {
  for (int64_t cut = kBlockK; cut < given.k; cut += kBlockK)
    for (const int m : {1, 15, 17, 33, kRows}) {
      const auto whole = multiply(given, 0, m), found = multiply_by_blocks(given, m, cut);
      bool own = true;
      for (int row = 0; row < m; ++row) own = own && same(&whole[row * kCStride], &found[row * kPanel]);
      expect(own, given.name() + ", " + std::to_string(m) + " rows, cut at " + std::to_string(cut) + ": the bits of the whole");
    }
}

// The first half of the columns alone.
void check_half(const Case& given) {
  for (const int m : {1, 16, 17, 32, 33, kRows}) {
    const auto whole = multiply(given, 0, m);
    std::vector<float> found(static_cast<size_t>(m * kPanel), kUntouched);
    for (int row = 0; row < m && given.add; ++row)
      memcpy(&found[row * kPanel], &given.begin[row * kPanel], sizeof(float) * kPanel / 2);
    kAmxBf16Tile.run_half({given.a.data(), given.stride, given.panel.data(), given.k, m, found.data(), kPanel, given.add,
                           {given.panel.data(), 7}});
    bool own = true, untouched = true;
    for (int row = 0; row < m; ++row) {
      own = own && memcmp(&found[row * kPanel], &whole[row * kCStride], sizeof(float) * kPanel / 2) == 0;
      for (int i = kPanel / 2; i < kPanel; ++i) untouched = untouched && found[row * kPanel + i] == kUntouched;
    }
    expect(own, given.name() + ", " + std::to_string(m) + " rows, half of the columns: the bits of the whole");
    expect(untouched, given.name() + ", " + std::to_string(m) + " rows, half of the columns: the others stay as they are");
  }
}

// A panel in two pieces.
void check_two(const Case& given) {
  for (int64_t cut = kBlockK; cut < given.k; cut += kBlockK) {
    const Guarded first(static_cast<size_t>(2 * cut * kPanel)), second(static_cast<size_t>(2 * (given.k - cut) * kPanel));
    memcpy(first.data(), given.panel.data(), static_cast<size_t>(2 * cut * kPanel));
    memcpy(second.data(), given.panel.data() + 2 * cut * kPanel, static_cast<size_t>(2 * (given.k - cut) * kPanel));
    for (const int m : {1, 17, kRows}) {
      const auto whole = multiply(given, 0, m);
      std::vector<float> found(given.begin.begin(), given.begin.begin() + m * kPanel);
      kAmxBf16Tile.run_two({given.a.data(), given.stride, first.data(), cut, m, found.data(), kPanel, given.add,
                            {given.panel.data(), 7}},
                           second.data(), given.k - cut);
      bool own = true;
      for (int row = 0; row < m; ++row) own = own && same(&whole[row * kCStride], &found[row * kPanel]);
      expect(own, given.name() + ", " + std::to_string(m) + " rows, two panels of k from " + std::to_string(cut) +
                      ": the bits of one");
    }
  }
}

void check_int8(int64_t k) {
  const Case whole(k, 0, true, Weights::kWhole), given(k, 0, true, Weights::kI8);
  check_case(given);
  expect(multiply(given, 0, kRows) == multiply(whole, 0, kRows), given.name() + ": the bits of the same numbers as bf16");
}

// A case's panel with codes from `base` on, and how many of its numbers have none.
std::pair<std::vector<uint16_t>, int64_t> coded(const Case& given, uint32_t base) {
  const int64_t count = given.k * kPanel;
  std::vector<uint16_t> panel(static_cast<size_t>(count));
  auto* list = const_cast<Uncoded*>(uncoded(panel.data(), given.k));
  int64_t others = 0;
  for (int64_t at = 0; at < count; ++at) {
    uint16_t number;
    memcpy(&number, given.panel.data() + 2 * at, 2);
    const uint32_t above = (number >> 7 & 0xffu) - base, own = number & 0x807fu;
    const int64_t block = at / kCodedBlockNumbers, group = at % kCodedBlockNumbers / kPanel, i = at % kPanel;
    uint16_t* words = panel.data() + block * 3 * kPanel + i;
    words[group / 2 * kPanel] |= static_cast<uint16_t>(group % 2 == 0 ? own : own << 8 | own >> 8);
    words[2 * kPanel] |= static_cast<uint16_t>((above & 15) << 4 * group);
    if (above > 15) list[others++] = {static_cast<uint32_t>(at), number, 0};
  }
  list[others] = {kNoPlace, 0, 0};
  return {panel, others};
}

void check_coded(int64_t k) {
  const Case given(k, 6, true);
  constexpr uint32_t kBase = 127 - 8;  // small numbers of a normal distribution have no code, the largest do
  const auto [panel, others] = coded(given, kBase);
  expect(others > 0, "coded, k " + std::to_string(k) + ": some numbers have no code");
  for (const int m : {1, 16, 17, 32, 33, kRows}) {
    const auto whole = multiply(given, 0, m);
    std::vector<float> found(given.begin.begin(), given.begin.begin() + m * kPanel);
    Tile tile{given.a.data(), given.stride, panel.data(), k, m, found.data(), kPanel, true, {panel.data(), 5}};
    tile.base = kBase;
    kAmxBf16Tile.run_coded(tile);
    bool own = true;
    for (int row = 0; row < m; ++row) own = own && same(&whole[row * kCStride], &found[row * kPanel]);
    expect(own, "coded, k " + std::to_string(k) + ", " + std::to_string(m) + " rows: the bits of the panel without codes");
  }
}

// Whether products with a panel, gone through as drivers do for so many tiles, have the bits of those with the case's own panel.
bool has_bits_of_own(const Case& given, const PackedWeight& weight, int64_t tiles) {
  std::vector<char> spare(weight.spare_bytes(isa()));
  ReadyPanel ready = weight.ready(0, isa(), spare.data(), tiles);
  bool own = true;
  for (int tile = 0; tile < tiles; ++tile) {
    const int first = 5 * tile, m = 7;
    std::vector<float> found(m * kPanel);
    ready.multiply({given.a.data() + first * given.stride, given.stride, ready.data, weight.k, m, found.data(), kPanel, false,
                    {weight.data, 5}});
    const auto expected = multiply(given, first, m);
    for (int row = 0; row < m; ++row) own = own && same(&expected[row * kCStride], &found[row * kPanel]);
  }
  return own;
}

// As the drivers go through the tiles of a panel, coded or not.
void check_tiles_of_a_panel(int64_t k) {
  const Case given(k, 6, false);
  const auto plain = reinterpret_cast<const uint16_t*>(given.panel.data());
  std::vector<uint16_t> panel(static_cast<size_t>(k * kPanel));
  const uint8_t mark = code_panel(plain, k, panel.data());
  expect(mark != 0, "a panel of normal numbers is coded");
  for (const bool is_coded : {false, true})
    for (int64_t tiles = 1; tiles <= 6; ++tiles) {
      const PackedWeight weight{is_coded ? panel.data() : plain, DType::kBf16, nullptr, kPanel, k, is_coded ? &mark : nullptr};
      expect(has_bits_of_own(given, weight, tiles), (is_coded ? "a coded panel for " : "a panel for ") + std::to_string(tiles) + " tiles");
    }
}

// The sum of even k 2^24 - 2^24 and of odd k 1 + 1: apart, they make 2; one after the other, 1.
float in_order() {
  const Case given(4, 0, false);
  for (int64_t i = 0; i < 4; ++i) Case::put(given.a.data(), i, f32_to_bf16(i % 2 == 1 ? 1.0f : i == 0 ? 0x1p24f : -0x1p24f));
  for (int64_t i = 0; i < 4 * kPanel; ++i) Case::put(given.panel.data(), i, f32_to_bf16(1.0f));
  return multiply(given, 0, 1)[0];
}

// left * right + begin, where results or what they are made of may be too small to be normal.
float small(float left, float right, float begin) {
  Case given(2, 0, true);
  for (int64_t i = 0; i < 2; ++i) Case::put(given.a.data(), i, f32_to_bf16(i == 0 ? left : 0.0f));
  for (int64_t i = 0; i < 2 * kPanel; ++i) Case::put(given.panel.data(), i, f32_to_bf16(right));
  given.begin[0] = begin;
  return multiply(given, 0, 1)[0];
}

void check_arithmetic() {
  expect(in_order() == 2.0f, "even and odd k are added up apart");
  expect(small(0x1p-60f, 0x1p-60f, 0x1p-100f) == 0x1p-100f + 0x1p-120f, "small numbers count");
  expect(small(0x1p-70f, 0x1p-70f, 0.0f) == 0.0f, "a product too small to be normal is zero");
  expect(small(0x1p-130f, 0x1p20f, 0.0f) == 0.0f, "a number too small to be normal is zero");
  expect(small(0.0f, 0.0f, 0x1p-130f) == 0.0f, "so is a sum's beginning");
  expect(std::isnan(small(std::numeric_limits<float>::infinity(), 0.0f, 1.0f)), "infinity times zero is no number");
}

TileConfig current_config() {
  TileConfig config;
  asm volatile("sttilecfg (%0)" : : "r"(&config) : "memory");
  return config;
}

void check_configuration() {
  const Case given(64, 0, false);
  const auto expected = multiply(given, 0, 9);
  expect(current_config().palette == 1 && current_config().rows[0] == 9, "a tile configures as many rows as it has");
  kAmxBf16Tile.release();
  expect(current_config().palette == 0 && current_config().rows[0] == 0, "release leaves nothing configured");
  TileConfig others;
  others.rows[0] = 3;
  others.row_bytes[0] = 8;
  configure_tiles(others);
  expect(multiply(given, 0, 9) == expected, "a task does not rely on the configuration that other code left");
  kAmxBf16Tile.release();
}

void check_threads() {
  const Case given(130, 6, false);
  const auto here = multiply(given, 0, 9);
  std::vector<float> there;
  std::thread([&] {
    there = multiply(given, 0, 9);
    kAmxBf16Tile.release();
  }).join();
  expect(there == here, "a thread configures its own tiles, whatever another has configured");
  expect(multiply(given, 0, 9) == here, "a thread's tiles stay when another releases its own");
  kAmxBf16Tile.release();
}

void break_a_rule(const std::string& rule) {
  static const Guarded memory(1024);
  TileConfig config;
  for (const int tile : {0, 1, 2}) {
    config.rows[tile] = static_cast<uint8_t>(rule == "unlike rows" && tile == 0 ? 15 : 16);
    config.row_bytes[tile] = 64;
  }
  if (rule == "17 rows") config.rows[0] = 17;
  if (rule == "reserved") config.reserved[0] = 1;
  if (rule != "unconfigured") configure_tiles(config);
  if (rule == "left out") zero_tile<3>();
  if (rule == "after release") release_tiles();
  amx_emulation::allow(memory.data(), rule == "read outside" ? 1023 : 1024, rule != "written outside");
  load_tile<1>(memory.data(), 64);
  load_tile<2>(memory.data(), 64);
  multiply_tiles<0, 1, 2>();
  store_tile<1>(memory.data(), 64);
}

// Plain rows of a panel of k, whose numbers `draw` gives.
template <typename Draw>
std::vector<uint16_t> rows_of(int64_t k, Draw draw) {
  std::vector<uint16_t> rows(static_cast<size_t>(k * kPanel));
  for (auto& number : rows) number = f32_to_bf16(draw());
  return rows;
}

// A panel whose groups share scales as the drivers go through it: the bits of the panel of bf16.
void check_grouped(const std::vector<uint16_t>& rows, int64_t k, DType dtype, const std::vector<uint8_t>& panel, const std::string& name) {
  Case given(k, 6, false);
  put_pairs(rows, k, reinterpret_cast<uint16_t*>(given.panel.data()));
  for (int64_t tiles = 1; tiles <= 4; ++tiles) {
    const PackedWeight weight{panel.data(), dtype, nullptr, kPanel, k};
    expect(has_bits_of_own(given, weight, tiles),
           name + ", k " + std::to_string(k) + ", " + std::to_string(tiles) + " tiles: the bits of the panel of bf16");
  }
}

std::vector<uint8_t> room_for(DType dtype, int64_t k) { return std::vector<uint8_t>(static_cast<size_t>(packed_bytes(dtype, k * kPanel))); }

void check_fp4_tiles_of_a_panel(int64_t k) {
  std::mt19937 random(static_cast<unsigned>(k));
  constexpr float kNumbers[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const auto rows = rows_of(k, [&] {
    const auto code = random() % 16;
    return code < 8 ? kNumbers[code] : -kNumbers[code - 8];
  });
  auto panel = room_for(DType::kFp4, k);
  expect(pack_fp4_panel(rows.data(), k, panel.data()), "a panel of numbers of mxfp4 is packed");
  check_grouped(rows, k, DType::kFp4, panel, "fp4");
}

using PackFn = bool (*)(const uint16_t* plain, int64_t k, int64_t group, void* to);

// Integers of at most `most` times a scale for each group.
void check_scaled_tiles_of_a_panel(int64_t k, DType dtype, int64_t group, int most, PackFn pack, const std::string& name) {
  std::mt19937 random(static_cast<unsigned>(k));
  float scale = 0.0f;
  const auto rows = rows_of(k, [&, number = int64_t{0}]() mutable {
    if (number++ % group == 0) scale = std::ldexp(static_cast<float>(1024 + random() % 1024), -16);
    return static_cast<float>(static_cast<int>(random() % (2 * most)) - most) * scale;
  });
  auto panel = room_for(dtype, k);
  expect(pack(rows.data(), k, group, panel.data()), name + ": a panel is packed");
  check_grouped(rows, k, dtype, panel, name + " by " + std::to_string(group));
}

}  // namespace

int main(int argc, char** argv) {
  emulated = !tiles_are_usable();
  if (emulated) amx_emulation::install();
  std::printf("%s\n", emulated ? "emulation" : "hardware");
  std::fflush(stdout);
  if (argc > 1) {
    if (emulated) break_a_rule(argv[1]);
    return 0;
  }
  check_arithmetic();
  for (const int64_t k : {2, 6, 30, 32, 34, 64, 130, 1024}) {
    for (const bool add : {false, true})
      for (const int64_t gap : {0, 6}) check_case(Case(k, gap, add));
    check_int8(k);
  }
  for (const int64_t k : {4, 28, 32, 36, 64, 132}) check_coded(k);
  for (const int64_t k : {64, 512}) check_tiles_of_a_panel(k);
  for (const int64_t k : {32, 96, 512}) check_fp4_tiles_of_a_panel(k);
  for (const int64_t k : {128, 384, 512}) {
    for (const auto& [dtype, group] : {std::pair(DType::kInt4By32, 32), {DType::kInt4By64, 64}, {DType::kInt4By128, 128}})
      check_scaled_tiles_of_a_panel(k, dtype, group, 8, pack_int4_panel, "int4");
    for (const bool wide : {false, true}) {
      check_scaled_tiles_of_a_panel(k, wide ? DType::kFp8By128 : DType::kFp8By32, wide ? 128 : 32, 15, pack_fp8_panel, "fp8");
      check_scaled_tiles_of_a_panel(k, wide ? DType::kInt8By128 : DType::kInt8By32, wide ? 128 : 32, 127, pack_int8_panel, "int8");
    }
  }
  for (const int64_t k : {34, 96, 130})
    for (const bool add : {false, true}) {
      const Case given(k, 6, add);
      check_after_whole(given);
      check_blocks(given);
      check_half(given);
      check_two(given);
    }
  check_configuration();
  check_threads();
  return failures == 0 ? 0 : 1;
}
