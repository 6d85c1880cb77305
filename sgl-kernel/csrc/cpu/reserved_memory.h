// Owns memory that the kernel has given before it is needed. Scratch and torch's large tensors are cut from it first.
//
// Memory that is written for the first time waits until the kernel has given and cleared it, on a virtual machine at a
// tenth of the rate of memory in use, which a first forward pass would wait for.
#pragma once

#include <cstddef>

namespace sgl_batch {

// Has the kernel give up to `bytes`, rounded up to whole huge pages, by so many threads, for about so many seconds, and
// keeps it in reserve in place of what an earlier call left. Returns how much it has given: 0 before Linux 5.14.
size_t reserve_memory(size_t bytes, double seconds, int threads);

// Whole huge pages, as map_huge_pages has them and to be given back as they are: from the reserve as long as it suffices.
void* take_huge_pages(size_t bytes);

}  // namespace sgl_batch
