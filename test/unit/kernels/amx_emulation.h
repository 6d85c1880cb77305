// Owns AMX instructions on processors that lack them: the fault that each raises there is caught, the instruction is read
// from the program and done in software, as the manual has it (Intel SDM, volume 2: LDTILECFG and on, TDPBF16PS, TDPBSUD). So the
// very code is tested that runs on processors which have them. It decides no results.
//
// What the manual forbids, and any access outside memory that has been allowed, ends the process with code kRefused and
// a line on stderr.
#pragma once

#include <cstddef>

namespace amx_emulation {

constexpr int kRefused = 3;

// From now on, for all threads; each has tiles of its own.
void install();

// Rows of tiles may be read from (and written to, where `writable`) these bytes. Until the first such call after
// forget_allowed() they may be anywhere. Not while other threads use tiles.
void allow(const void* begin, size_t bytes, bool writable);
void forget_allowed();

}  // namespace amx_emulation
