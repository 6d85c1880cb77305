// Owns what every operator asks of its tensors, with messages that say what was given.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fp4.h"
#include "fp8.h"
#include "gemm.h"
#include "int4.h"
#include "int8_groups.h"

namespace sgl_batch {

inline DType dtype_of(const at::Tensor& tensor, const char* name) {
  if (tensor.scalar_type() == at::kBFloat16) return DType::kBf16;
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name, " is ", tensor.scalar_type(), "; use bfloat16 or float32");
  return DType::kF32;
}

// Of weights, which may be int8 too.
inline DType weight_dtype_of(const at::Tensor& tensor, const char* name) {
  return tensor.scalar_type() == at::kChar ? DType::kI8 : dtype_of(tensor, name);
}

// Of int4: words of 32 bits, as many as k numbers of a row need with the scales of their groups.
inline DType int4_dtype_of(const at::Tensor& tensor, int64_t k, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt, name, " is ", tensor.scalar_type(), "; int4 is int32");
  for (const DType dtype : {DType::kInt4By128, DType::kInt4By64, DType::kInt4By32})
    if (k % int4_group(dtype) == 0 && tensor.size(-1) * 4 == packed_bytes(dtype, k)) return dtype;
  TORCH_CHECK(false, name, " is ", tensor.sizes(), ", whose rows are no int4 of ", k, " inputs in groups of 32, 64 or 128");
}
// Of fp8: bytes likewise.
inline DType fp8_dtype_of(const at::Tensor& tensor, int64_t k, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat8_e4m3fn, name, " is ", tensor.scalar_type(), "; fp8 is float8_e4m3fn");
  for (const DType dtype : {DType::kFp8By128, DType::kFp8By32})
    if (k % fp8_group(dtype) == 0 && tensor.size(-1) == packed_bytes(dtype, k)) return dtype;
  TORCH_CHECK(false, name, " is ", tensor.sizes(), ", whose rows are no fp8 of ", k, " inputs in groups of 32 or 128");
}
// Of int8 in groups: words of two bytes likewise.
inline DType int8_groups_dtype_of(const at::Tensor& tensor, int64_t k, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kShort, name, " is ", tensor.scalar_type(), "; int8 in groups is int16");
  for (const DType dtype : {DType::kInt8By128, DType::kInt8By32})
    if (k % int8_group(dtype) == 0 && tensor.size(-1) * 2 == packed_bytes(dtype, k)) return dtype;
  TORCH_CHECK(false, name, " is ", tensor.sizes(), ", whose rows are no int8 of ", k, " inputs in groups of 32 or 128");
}
// Whether the size of a row alone does not tell how many inputs it has.
inline bool has_scales_beside(const at::Tensor& weight) {
  return weight.scalar_type() == at::kInt || weight.scalar_type() == at::kFloat8_e4m3fn || weight.scalar_type() == at::kShort;
}
// How many inputs a matrix of so many numbers, or bytes, a row has.
inline int64_t inputs_of(const at::Tensor& weight, int64_t columns) {
  return weight.scalar_type() == at::kByte ? columns / 17 * 32 : columns;
}
// Of matrices of n outputs and k inputs, whose numbers may share scales, too: bytes of fp4, words of int4, bytes of fp8,
// words of int8.
inline DType matrix_dtype_of(const at::Tensor& weight, int64_t n, int64_t k, const char* name) {
  if (weight.scalar_type() == at::kInt) {
    TORCH_CHECK(n % kPanel == 0, name, " is int4 of ", n, " outputs; use a multiple of ", kPanel);
    return int4_dtype_of(weight, k, name);
  }
  if (weight.scalar_type() == at::kFloat8_e4m3fn) {
    TORCH_CHECK(n % kPanel == 0, name, " is fp8 of ", n, " outputs; use a multiple of ", kPanel);
    return fp8_dtype_of(weight, k, name);
  }
  if (weight.scalar_type() == at::kShort) {
    TORCH_CHECK(n % kPanel == 0, name, " is int8 in groups of ", n, " outputs; use a multiple of ", kPanel);
    return int8_groups_dtype_of(weight, k, name);
  }
  TORCH_CHECK(inputs_of(weight, weight.size(-1)) == k, name, " is ", weight.sizes(), " for ", k, " inputs");
  if (weight.scalar_type() != at::kByte) return weight_dtype_of(weight, name);
  TORCH_CHECK(fp4_takes(n, k), name, " is fp4 of ", n, " outputs and ", k, " inputs; use multiples of ", kPanel, " and ", kFp4BlockK);
  return DType::kFp4;
}
// Of experts' weights, of one number type.
inline DType expert_dtype_of(const at::Tensor& w13, int64_t hidden, const at::Tensor& w2, int64_t inter) {
  TORCH_CHECK(w13.scalar_type() == w2.scalar_type(), "w13 is ", w13.scalar_type(), " but w2 is ", w2.scalar_type());
  const DType dtype = matrix_dtype_of(w13, inter, hidden, "w13");
  TORCH_CHECK(matrix_dtype_of(w2, hidden, inter, "w2") == dtype, "w13 is ", w13.sizes(), " but w2 ", w2.sizes(),
              ", which has groups of another size");
  return dtype;
}

inline void check(const at::Tensor& tensor, int64_t dim, const char* name) {
  TORCH_CHECK(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, not ", dim);
  TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
}

// The scales of a weight's `count` outputs: int8 has them, other number types have none.
inline const float* scales_of(const at::Tensor& weight, const std::optional<at::Tensor>& scales, int64_t count,
                              const char* name) {
  const bool needed = weight.scalar_type() == at::kChar;
  TORCH_CHECK(needed == scales.has_value(), name, " is ", weight.scalar_type(), needed ? " without" : " with", " scales");
  if (!needed) return nullptr;
  TORCH_CHECK(scales->is_contiguous() && scales->scalar_type() == at::kFloat && scales->numel() == count, "scales of ", name,
              " are ", scales->scalar_type(), scales->sizes(), "; use contiguous float32, one for each of ", count, " outputs");
  return scales->data_ptr<float>();
}

inline const float* floats_in(const std::optional<at::Tensor>& given, int64_t count, const char* name) {
  if (!given.has_value()) return nullptr;
  TORCH_CHECK(given->scalar_type() == at::kFloat && given->is_contiguous() && given->numel() == count, name, " is ",
              given->scalar_type(), given->sizes(), "; use ", count, " contiguous float32");
  return given->data_ptr<float>();
}

inline void check_choices(const at::Tensor& topk_weights, const at::Tensor& topk_ids, int64_t tokens) {
  check(topk_weights, 2, "topk_weights");
  check(topk_ids, 2, "topk_ids");
  TORCH_CHECK(topk_ids.sizes() == topk_weights.sizes() && topk_ids.size(0) == tokens, "topk_ids is ", topk_ids.sizes(),
              " and topk_weights ", topk_weights.sizes(), " for ", tokens, " tokens");
  TORCH_CHECK(topk_ids.scalar_type() == at::kInt, "topk_ids is ", topk_ids.scalar_type(), "; use int32");
  TORCH_CHECK(topk_weights.scalar_type() == at::kFloat, "topk_weights is ", topk_weights.scalar_type(), "; use float32");
}

inline void check_index(const at::Tensor& tensor, const char* name) {
  check(tensor, 1, name);
  TORCH_CHECK(tensor.scalar_type() == at::kLong, name, " is ", tensor.scalar_type(), "; use int64");
}

// Pieces of sequences over pages, as attention.h has them: every row and every page exists.
inline void check_pieces(const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& table_starts,
                         const at::Tensor& tables, int64_t rows, int64_t page, int64_t num_pages) {
  check_index(starts, "starts");
  check_index(lengths, "lengths");
  check_index(table_starts, "table_starts");
  check_index(tables, "tables");
  const int64_t pieces = lengths.size(0);
  TORCH_CHECK(starts.size(0) == pieces + 1 && table_starts.size(0) == pieces, "starts are ", starts.sizes(),
              " and table_starts ", table_starts.sizes(), " for ", pieces, " pieces");
  const auto *from = starts.data_ptr<int64_t>(), *table = table_starts.data_ptr<int64_t>();
  const auto *length = lengths.data_ptr<int64_t>(), *number = tables.data_ptr<int64_t>();
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t own = from[i + 1] - from[i], pages = (length[i] + page - 1) / page;
    TORCH_CHECK(from[i] >= 0 && own >= 0 && from[i + 1] <= rows && length[i] >= own, "piece ", i, " is rows ", from[i],
                " to ", from[i + 1], " of ", rows, " and ", length[i], " tokens");
    TORCH_CHECK(table[i] >= 0 && table[i] + pages <= tables.size(0), "piece ", i, " has ", pages, " pages from ", table[i],
                " on, but the tables end at ", tables.size(0));
    for (int64_t p = table[i]; p < table[i] + pages; ++p)
      TORCH_CHECK(number[p] >= 0 && number[p] < num_pages, "page ", number[p], " of ", num_pages);
  }
}

}  // namespace sgl_batch
