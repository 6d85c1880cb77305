#include "amx_emulation.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace amx_emulation {
namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tile {
  int rows, row_bytes;
  uint8_t data[kRows][kRowBytes];
};

struct State {
  Config config;  // all zero where tiles are not configured
  Tile tiles[kTiles];
};
thread_local State state;

struct Span {
  uintptr_t begin, end;
  bool writable;
};
std::vector<Span> allowed;

[[noreturn]] void refuse(const char* what) {
  const char head[] = "amx_emulation: ";
  if (write(2, head, sizeof head - 1) < 0 || write(2, what, strlen(what)) < 0 || write(2, "\n", 1) < 0) _exit(kRefused + 1);
  _exit(kRefused);
}

void check_access(uintptr_t begin, int bytes, bool writes) {
  if (allowed.empty()) return;
  for (const Span& span : allowed)
    if (begin >= span.begin && begin + bytes <= span.end && (span.writable || !writes)) return;
  refuse(writes ? "a tile's row is written outside the memory for it" : "a tile's row is read outside the memory for it");
}

Tile& tile_at(int number) {
  if (state.config.palette == 0) refuse("tiles are used that are not configured");
  if (number >= kTiles) refuse("there is no such tile");
  Tile& tile = state.tiles[number];
  if (tile.rows == 0) refuse("a tile is used that the configuration leaves out");
  return tile;
}

void release() { memset(&state, 0, sizeof state); }

void load_config(const Config& config) {
  release();
  if (config.palette == 0) return;
  if (config.palette != 1 || config.start_row != 0) refuse("a configuration has an unknown palette or a first row");
  for (const uint8_t byte : config.reserved)
    if (byte != 0) refuse("a configuration has reserved bytes that are not zero");
  for (int i = 0; i < 16; ++i) {
    if ((config.rows[i] == 0) != (config.row_bytes[i] == 0)) refuse("a tile is configured by half");
    if (config.rows[i] > (i < kTiles ? kRows : 0) || config.row_bytes[i] > kRowBytes) refuse("a tile is configured too large");
    if (i < kTiles) state.tiles[i] = {config.rows[i], config.row_bytes[i], {}};
  }
  state.config = config;
}

void load(Tile& tile, uintptr_t from, int64_t stride) {
  memset(tile.data, 0, sizeof tile.data);
  for (int row = 0; row < tile.rows; ++row, from += stride) {
    check_access(from, tile.row_bytes, false);
    memcpy(tile.data[row], reinterpret_cast<const void*>(from), tile.row_bytes);
  }
}

void store(const Tile& tile, uintptr_t to, int64_t stride) {
  for (int row = 0; row < tile.rows; ++row, to += stride) {
    check_access(to, tile.row_bytes, true);
    memcpy(reinterpret_cast<void*>(to), tile.data[row], tile.row_bytes);
  }
}

// Numbers too small to be normal count as zero, going in and coming out.
float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
float multiply_add(float sum, float a, float b) { return flushed(std::fma(flushed(a), flushed(b), sum)); }
float add(float a, float b) { return flushed(flushed(a) + flushed(b)); }

float f32_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

void check_fit(const Tile& sums, const Tile& a, const Tile& b) {
  if (&sums == &a || &sums == &b || &a == &b) refuse("a product has the same tile twice");
  if (sums.rows != a.rows || sums.row_bytes != b.row_bytes || a.row_bytes != 4 * b.rows || b.row_bytes % 4 != 0)
    refuse("a product has tiles that do not fit");
}

// Products of even k are added up from the first, those of odd k likewise, then both, then that to the tile.
void multiply(Tile& sums, const Tile& a, const Tile& b) {
  check_fit(sums, a, b);
  for (int m = 0; m < sums.rows; ++m) {
    float even[kRows] = {}, odd[kRows] = {};
    uint32_t left[kRows], right[kRows];
    float row[kRows];
    memcpy(left, a.data[m], sizeof left);
    memcpy(row, sums.data[m], sizeof row);
    for (int k = 0; k < b.rows; ++k) {
      memcpy(right, b.data[k], sizeof right);
      for (int n = 0; n < kRows; ++n) {
        even[n] = multiply_add(even[n], f32_of(left[k] << 16), f32_of(right[n] << 16));
        odd[n] = multiply_add(odd[n], f32_of(left[k] & 0xffff0000u), f32_of(right[n] & 0xffff0000u));
      }
    }
    for (int n = 0; n < kRows; ++n) row[n] = add(row[n], add(even[n], odd[n]));
    memcpy(sums.data[m], row, sums.row_bytes);
  }
}

// Signed bytes of a times unsigned ones of b, in int32, which goes around at its ends.
void multiply_bytes(Tile& sums, const Tile& a, const Tile& b) {
  check_fit(sums, a, b);
  for (int m = 0; m < sums.rows; ++m)
    for (int n = 0; n < b.row_bytes / 4; ++n) {
      uint32_t sum;
      memcpy(&sum, sums.data[m] + 4 * n, 4);
      for (int k = 0; k < b.rows; ++k)
        for (int i = 0; i < 4; ++i)
          sum += static_cast<uint32_t>(static_cast<int8_t>(a.data[m][4 * k + i]) * static_cast<int>(b.data[k][4 * n + i]));
      memcpy(sums.data[m] + 4 * n, &sum, 4);
    }
}

// One VEX instruction with a register field, and a register or memory.
struct Instruction {
  int opcode, prefix, reg, rm, vvvv, length;
  bool memory;
  uintptr_t base;   // and displacement
  int64_t indexed;  // index times scale: for tiles, the stride
};

uint64_t register_of(const ucontext_t* context, int number) {
  static constexpr int kPlaces[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                      REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<uint64_t>(context->uc_mcontext.gregs[kPlaces[number]]);
}

void decode_memory(Instruction& found, const uint8_t* code, const ucontext_t* context, int mod, int x, int b) {
  bool has_base = true;
  int base = found.rm;
  if ((found.rm & 7) == 4) {
    const uint8_t sib = code[found.length++];
    const int index = ((sib >> 3) & 7) | x << 3;
    base = (sib & 7) | b << 3;
    if (index != 4) found.indexed = static_cast<int64_t>(register_of(context, index) << (sib >> 6));
    has_base = mod != 0 || (sib & 7) != 5;
  } else if (mod == 0 && (found.rm & 7) == 5) {
    refuse("an instruction has an address that is not understood here: relative to itself");
  }
  int32_t displacement = 0;
  if (mod == 1) displacement = static_cast<int8_t>(code[found.length++]);
  if (mod == 2 || !has_base) {
    memcpy(&displacement, code + found.length, 4);
    found.length += 4;
  }
  found.base = (has_base ? register_of(context, base) : 0) + static_cast<int64_t>(displacement);
}

Instruction decode(const ucontext_t* context) {
  const auto* code = reinterpret_cast<const uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
  // Three bytes of VEX, of the map 0F38, without W and L.
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) refuse("an illegal instruction that is not AMX");
  const int r = (code[1] >> 7 & 1) ^ 1, x = (code[1] >> 6 & 1) ^ 1, b = (code[1] >> 5 & 1) ^ 1;
  const int mod = code[4] >> 6;
  Instruction found{code[3], code[2] & 3, (code[4] >> 3 & 7) | r << 3, (code[4] & 7) | b << 3, (code[2] >> 3 & 15) ^ 15, 5,
                    mod != 3, 0, 0};
  if (found.memory) decode_memory(found, code, context, mod, x, b);
  return found;
}

void execute(const Instruction& it) {
  enum { kNone, k66, kF3, kF2 };
  const int kind = it.opcode << 4 | it.prefix << 1 | static_cast<int>(it.memory);
  const auto kind_of = [](int opcode, int prefix, bool memory) { return opcode << 4 | prefix << 1 | static_cast<int>(memory); };
  if (kind == kind_of(0x49, kNone, true)) {
    Config config;
    memcpy(&config, reinterpret_cast<const void*>(it.base + it.indexed), sizeof config);
    load_config(config);
  } else if (kind == kind_of(0x49, k66, true)) {
    memcpy(reinterpret_cast<void*>(it.base + it.indexed), &state.config, sizeof state.config);
  } else if (kind == kind_of(0x49, kNone, false)) {
    release();
  } else if (kind == kind_of(0x49, kF2, false)) {
    memset(tile_at(it.reg).data, 0, sizeof(Tile::data));
  } else if (kind == kind_of(0x4b, kF2, true) || kind == kind_of(0x4b, k66, true)) {  // the second one hints that rows pass
    load(tile_at(it.reg), it.base, it.indexed);
  } else if (kind == kind_of(0x4b, kF3, true)) {
    store(tile_at(it.reg), it.base, it.indexed);
  } else if (kind == kind_of(0x5c, kF3, false)) {
    multiply(tile_at(it.reg), tile_at(it.rm), tile_at(it.vvvv));
  } else if (kind == kind_of(0x5e, kF3, false)) {
    multiply_bytes(tile_at(it.reg), tile_at(it.rm), tile_at(it.vvvv));
  } else {
    refuse("an illegal instruction that is not known here");
  }
}

void on_illegal(int, siginfo_t*, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  const Instruction found = decode(context);
  execute(found);
  context->uc_mcontext.gregs[REG_RIP] += found.length;
}

}  // namespace

void install() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal;
  action.sa_flags = SA_SIGINFO;
  if (sigaction(SIGILL, &action, nullptr) != 0) refuse("the handler of illegal instructions cannot be set");
}

void allow(const void* begin, size_t bytes, bool writable) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  allowed.push_back({at, at + bytes, writable});
}

void forget_allowed() { allowed.clear(); }

}  // namespace amx_emulation

#ifdef SGL_BATCH_EMULATED_AMX
// As a part of the kernels there is nobody to call it.
__attribute__((constructor)) static void install_at_load() { amx_emulation::install(); }
#endif
