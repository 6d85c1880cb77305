// Owns attention over pages: prefill pieces with a cached prefix and decode rows alike.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace sgl_batch {

// Pages hold `page` tokens of `page_heads` heads, of which k_pages and v_pages begin at the first of `kv_heads`. Of one
// head and page, keys are a packed matrix [page, dim] (a panel is kPanel tokens wide) and values a packed matrix
// [dim, page] (a panel is kPanel channels wide), as in gemm.h.
//
// Piece i is rows [starts[i], starts[i + 1]) of q: the last tokens of a sequence of lengths[i] tokens, all of which lie
// in the pages tables[table_starts[i]] and on. Row r of a piece sees the tokens up to its own: all, or the last `window`.
struct AttentionCall {
  int64_t pieces, q_heads, kv_heads, page_heads, dim, page;
  const void* q;  // [rows, q_heads * dim]
  int64_t q_stride;
  const void* k_pages;
  const void* v_pages;
  DType dtype;
  const int64_t* starts;        // [pieces + 1]
  const int64_t* lengths;       // [pieces]
  const int64_t* table_starts;  // [pieces]
  const int64_t* tables;
  float scaling;
  int64_t window;      // tokens that a row sees, its own included; 0 for all
  const float* sinks;  // [q_heads]: a score beside those of the tokens, whose weight goes to no value; or null
  void* out;           // [rows, q_heads * dim]
};

// A row is computed page by page, from the first, with a running maximum and sum: its result depends neither on the
// rows beside it nor on how its sequence was cut into pieces.
void run_attention(const AttentionCall& call);

}  // namespace sgl_batch
