// Owns the check that products in int8 have the same bits by AMX tiles, whose rows lie by blocks of k and whose k is cut into
// parts, as by the kernel for any machine. On a processor without AMX its instructions are emulated.
//
// Prints what executes the instructions, then a line for each product that differs, and ends with 1 if there was one.
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "amx_emulation.h"
#include "amx_tiles.h"
#include "experts_int8.h"
#include "linear_int8.h"

namespace {
const sgl_batch::Int8Kernel* used = nullptr;
}

// In place of what chooses for a machine.
namespace sgl_batch {
const Isa& isa() { return kPortable; }
const Int8Kernel& int8_kernel() { return *used; }
}  // namespace sgl_batch

namespace {

using namespace sgl_batch;

constexpr int64_t kSome = 40;  // rows of which an expert has more than a tile

int failures = 0;
std::mt19937 draw(7);

std::vector<float> normal(int64_t count) {
  std::normal_distribution<float> number;
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& value : numbers) value = number(draw);
  return numbers;
}

// Matrices [batch, n, k], packed, with scales.
struct Weight {
  Weight(int64_t batch, int64_t n, int64_t k) : numbers(static_cast<size_t>(batch * n * k)), scales(normal(batch * n)) {
    std::vector<int8_t> scratch(static_cast<size_t>(kPanel * k));
    for (int8_t& number : numbers) number = static_cast<int8_t>(draw());
    for (int64_t i = 0; i < batch; ++i) pack_quads(numbers.data() + i * n * k, n, k, scratch.data());
  }
  const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(numbers.data()); }

  std::vector<int8_t> numbers;
  std::vector<float> scales;
};

// `run` writes a product of so many numbers.
template <typename Run>
void check(const std::string& name, int64_t numbers, const Run& run) {
  static const Int8Kernel tiles = [] {
    Int8Kernel kernel = kAmxInt8;
    kernel.divide = divide_plainly;  // this machine may lack AVX512
    return kernel;
  }();
  std::vector<float> by_tiles(static_cast<size_t>(numbers)), plainly(static_cast<size_t>(numbers));
  used = &tiles, run(by_tiles.data());
  used = &kPortableInt8, run(plainly.data());
  if (memcmp(by_tiles.data(), plainly.data(), sizeof(float) * static_cast<size_t>(numbers)) == 0) return;
  ++failures;
  std::printf("differs: %s\n", name.c_str());
}

void check_linear(int64_t rows, int64_t n, int64_t k) {
  const auto x = normal(rows * k), bias = normal(n);
  const Weight weight(1, n, k);
  const PackedInt8 packed{weight.data(), weight.scales.data(), n, k};
  check("linear of " + std::to_string(rows) + " rows, " + std::to_string(n) + " x " + std::to_string(k), rows * n,
        [&](float* out) { run_linear_int8({rows, x.data(), DType::kF32, packed, bias.data(), out}); });
}

// Of `experts` each token chooses the first and one of the others in turn, so that there are experts with many and few rows.
void check_experts(int64_t tokens, int64_t hidden, int64_t inter, int64_t experts) {
  const auto x = normal(tokens * hidden), w13_bias = normal(experts * 2 * inter), w2_bias = normal(experts * hidden);
  const Weight w13(2 * experts, inter, hidden), w2(experts, hidden, inter);
  const auto weights = normal(2 * tokens);
  std::vector<int32_t> ids;
  for (int64_t token = 0; token < tokens; ++token) ids.insert(ids.end(), {0, static_cast<int32_t>(1 + token % (experts - 1))});
  std::vector<int64_t> rows(static_cast<size_t>(experts));
  check("experts of " + std::to_string(tokens) + " tokens, " + std::to_string(hidden) + ", " + std::to_string(inter),
        tokens * hidden, [&](float* out) {
          ExpertsCall call{};
          call.tokens = tokens, call.top_k = 2, call.hidden = hidden, call.inter = inter, call.experts = experts;
          call.x = x.data(), call.x_stride = hidden, call.x_dtype = DType::kF32, call.w_dtype = DType::kI8;
          call.w13 = w13.data(), call.w2 = w2.data(), call.w13_scales = w13.scales.data(), call.w2_scales = w2.scales.data();
          call.topk_weights = weights.data(), call.topk_ids = ids.data(), call.rows_per_expert = rows.data();
          call.w13_bias = w13_bias.data(), call.w2_bias = w2_bias.data(), call.out = out, call.out_dtype = DType::kF32;
          run_experts_int8(call);
        });
}

}  // namespace

int main() {
  const bool emulated = !(tiles_are_usable() && int8_tiles_are_there());
  if (emulated) amx_emulation::install();
  std::printf("%s\n", emulated ? "emulation" : "hardware");
  std::fflush(stdout);
  for (const int64_t k : {3, 66, 1100})
    for (const int64_t rows : {int64_t{1}, int64_t{49}, 3 * kSome}) check_linear(rows, 70, k);
  check_linear(1100, 70, 600);  // several blocks of rows
  check_experts(1, 66, 33, 4);
  check_experts(kSome, 1100, 70, 3);
  check_experts(4 * kSome, 130, 600, 6);
  check_experts(600, 576, 70, 3);  // several blocks of one expert's rows
  return failures == 0 ? 0 : 1;
}
