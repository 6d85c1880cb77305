// One compiled copy of a function for each instruction set, chosen at load. Multiply-adds are not contracted, so that
// the copies round alike.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SGL_BATCH_CLONES __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3", "fp-contract=off")))
#else
#define SGL_BATCH_CLONES
#endif
