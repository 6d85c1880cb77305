// Owns the checks of the AMX kernel for int8: exact sums, for any number of rows and steps, by blocks and parts of k, and what
// is read and written. On a processor without AMX its instructions are emulated; there alone accesses to rows and sums are
// checked row by row.
//
// Prints what executes the instructions, then a line for each rule that does not hold, and ends with 1 if there was one.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "amx_emulation.h"
#include "amx_tiles.h"
#include "gemm_int8.h"
#include "guarded_memory.h"

namespace {

using namespace sgl_batch;

int failures = 0;
bool emulated = false;

void expect(bool holds, const std::string& rule) {
  if (holds) return;
  ++failures;
  std::printf("does not hold: %s\n", rule.c_str());
}

// Rows that go on with zeros to whole blocks, a panel behind which nothing may be read, and sums to add to.
struct Case {
  explicit Case(int64_t number_of_steps)
      : steps(number_of_steps),
        stride((steps * kQuad + kRowBytes - 1) / kRowBytes * kRowBytes),
        a(static_cast<size_t>(kMaxRows * stride)),
        panel(static_cast<size_t>(steps * kStepBytes)),
        begin(kMaxRows * kPanel) {
    std::mt19937 random(static_cast<unsigned>(steps));
    memset(a.data(), 0, static_cast<size_t>(kMaxRows * stride));
    for (int row = 0; row < kMaxRows; ++row) {
      for (int64_t k = 0; k < steps * kQuad; ++k)
        a.data()[row * stride + k] = static_cast<char>(row == 1 ? 127 : static_cast<int>(random() % 255) - 127);
    }
    for (int32_t& sum : begin) sum = static_cast<int32_t>(random());
    for (int64_t i = 0; i < steps * kStepBytes; ++i) panel.data()[i] = static_cast<char>(random());
  }

  int32_t sum(int row, int column, bool add) const {
    auto total = add ? static_cast<uint32_t>(begin[row * kPanel + column]) : 0;
    for (int64_t k = 0; k < steps * kQuad; ++k) {
      const auto weight = static_cast<uint8_t>(panel.data()[k / kQuad * kStepBytes + column * kQuad + k % kQuad]);
      total += static_cast<uint32_t>(static_cast<int8_t>(a.data()[row * stride + k]) * weight);
    }
    return static_cast<int32_t>(total);
  }

  int64_t steps, stride;
  Guarded a, panel;
  std::vector<int32_t> begin;
};

void expect_exact(const Case& given, int first, int m, bool add, const int32_t* c, const std::string& how) {
  bool exact = true;
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < kPanel; ++column)
      exact = exact && c[row * kPanel + column] == given.sum(first + row, column, add);
  expect(exact, std::to_string(given.steps) + " steps, " + std::to_string(m) + " rows from " + std::to_string(first) + how +
                    ": sums are exact");
}

void check_rows(const Case& given, int first, int m, bool add) {
  const Guarded memory(sizeof(int32_t) * static_cast<size_t>(m * kPanel));
  auto* c = reinterpret_cast<int32_t*>(memory.data());
  memcpy(c, &given.begin[first * kPanel], sizeof(int32_t) * static_cast<size_t>(m * kPanel));
  const char* a = given.a.data() + first * given.stride;
  if (emulated) {
    amx_emulation::forget_allowed();
    amx_emulation::allow(a, static_cast<size_t>(m * given.stride), false);
    amx_emulation::allow(c, sizeof(int32_t) * static_cast<size_t>(m * kPanel), true);
    amx_emulation::allow(given.panel.data(), static_cast<size_t>(given.steps * kStepBytes), false);
    constexpr size_t kScratch = 16384;  // the kernel's own, below on the stack
    amx_emulation::allow(static_cast<const char*>(__builtin_frame_address(0)) - kScratch, kScratch, false);
  }
  kAmxInt8.run({reinterpret_cast<const int8_t*>(a), given.stride, reinterpret_cast<const uint8_t*>(given.panel.data()),
                given.steps, m, c, {given.panel.data(), 7}, add});
  if (emulated) amx_emulation::forget_allowed();
  expect_exact(given, first, m, add, c, add ? ", added" : "");
}

// The same rows by blocks of k, first over k below `cut`, then over the rest. Between blocks lie other numbers.
void check_parts(const Case& given, int m, int64_t cut) {
  const int64_t blocks = given.stride / kRowBytes, block = m * kRowBytes + 128;
  const Guarded rows(static_cast<size_t>((blocks - 1) * block + m * kRowBytes));
  memset(rows.data(), 1, static_cast<size_t>((blocks - 1) * block + m * kRowBytes));
  for (int row = 0; row < m; ++row)
    for (int64_t i = 0; i < blocks; ++i)
      memcpy(rows.data() + i * block + row * kRowBytes, given.a.data() + row * given.stride + i * kRowBytes, kRowBytes);
  std::vector<int32_t> c(static_cast<size_t>(m * kPanel), 7);
  for (const auto& [from, to] : {std::pair<int64_t, int64_t>{0, cut}, {cut, given.steps * kQuad}})
    kAmxInt8.run({reinterpret_cast<const int8_t*>(rows.data()) + from / kRowBytes * block, kRowBytes,
                  reinterpret_cast<const uint8_t*>(given.panel.data()) + from * kPanel, (to - from) / kQuad, m, c.data(),
                  {given.panel.data(), 7}, from > 0, block});
  expect_exact(given, 0, m, false, c.data(), ", cut at " + std::to_string(cut));
}

}  // namespace

int main() {
  emulated = !(tiles_are_usable() && int8_tiles_are_there());
  if (emulated) amx_emulation::install();
  std::printf("%s\n", emulated ? "emulation" : "hardware");
  std::fflush(stdout);
  for (const int64_t steps : {1, 3, 15, 16, 17, 32, 65, 256}) {
    const Case given(steps);
    for (int m = 1; m <= kMaxRows; ++m)
      for (const int first : {0, kMaxRows - m})
        for (const bool add : {false, true}) check_rows(given, first, m, add);
    for (int64_t cut = kRowBytes; cut < steps * kQuad; cut += 2 * kRowBytes)
      for (const int m : {1, 15, 17, 33, kMaxRows}) check_parts(given, m, cut);
  }
  kAmxInt8.release();
  return failures == 0 ? 0 : 1;
}
