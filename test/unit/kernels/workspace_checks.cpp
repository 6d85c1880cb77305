// Owns the checks of what a workspace keeps: what a large call took stays while large ones come, and goes once they no longer do.
//
// Prints a line for each rule that does not hold, and ends with 1 if there was one.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "workspace.h"

namespace {

using sgl_batch::Workspace;

constexpr size_t kMiB = size_t{1} << 20, kLarge = 96 * kMiB, kSmall = 4 * kMiB;
constexpr int kLayers = 12;  // of a forward pass, the last of which needs little
int failures = 0;

void expect(bool holds, const char* rule) {
  if (holds) return;
  ++failures;
  std::printf("does not hold: %s\n", rule);
}

size_t resident(void* memory, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(bytes / page);
  if (mincore(memory, bytes, pages.data()) != 0) return 0;
  size_t there = 0;
  for (const unsigned char one : pages) there += one & 1;
  return there * page;
}

void* call(Workspace& workspace, size_t bytes) { return std::memset(workspace.at_least(bytes), 1, bytes); }

void check_passes() {
  Workspace workspace;
  for (int pass = 0; pass < 200; ++pass) {
    for (int layer = 1; layer < kLayers; ++layer) workspace.at_least(kLarge);
    void* memory = pass == 0 ? call(workspace, kLarge) : workspace.at_least(kLarge);
    workspace.at_least(kSmall);
    if (resident(memory, kLarge) < kLarge) return expect(false, "what large calls need stays where others need less");
  }
}

void check_small_calls_after_a_large_one() {
  Workspace workspace;
  void* memory = call(workspace, kLarge);
  expect(resident(memory, kLarge) == kLarge, "what was written is there");
  for (int i = 0; i < 2000; ++i) call(workspace, kSmall);
  expect(resident(memory, kLarge) <= kSmall + 2 * kMiB, "what only one large call needed is given back");
  memory = call(workspace, kLarge);
  expect(resident(memory, kLarge) == kLarge, "it is there again for the next large call");
}

void check_little_more() {
  Workspace workspace;
  void* memory = call(workspace, kSmall + 16 * kMiB);
  for (int i = 0; i < 2000; ++i) call(workspace, kSmall);
  expect(resident(memory, kSmall + 16 * kMiB) == kSmall + 16 * kMiB, "what is little more is kept");
}

}  // namespace

int main() {
  check_passes();
  check_small_calls_after_a_large_one();
  check_little_more();
  return failures > 0;
}
