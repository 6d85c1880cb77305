// Owns copying of large memory that nobody reads soon: what is written leaves the caches to others, and no line of it is read
// before it is written.
#pragma once

#include <cstdint>

namespace sgl_batch {

// By all threads. The two do not overlap.
void copy_past_caches(const void* from, void* to, int64_t bytes);

}  // namespace sgl_batch
