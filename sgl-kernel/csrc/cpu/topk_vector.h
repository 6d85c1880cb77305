// Owns the choice of a row's experts on the compiler's vector types, for one instruction set chosen by the including
// file, see gemm_vector.h. Which rows, and on which thread, is decided by topk.cpp.
#pragma once

#include "norm_rope_vector.h"
#include "rows_vector.h"

namespace sgl_batch {
namespace {

// Whole numbers in the order of the floats that they stand for: both zeros are equal and NaN is above all others.
constexpr int32_t kNoKey = -0x7fffffff - 1;  // below every float's
constexpr int32_t kNanKey = 0x7fffffff;

inline VecI splat_int(int32_t value) { return value - VecI{}; }

inline VecI keys_of(VecF value) {
  const VecI bits = (VecI)(value + 0.0f);
  return value == value ? bits ^ ((bits >> 31) & 0x7fffffff) : splat_int(kNanKey);
}

// Back again; any NaN for NaN.
inline float value_of(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

struct Best {
  int32_t key, at;
};

// Of all lanes.
template <int distance = kLanes / 2>
inline Best join_best(VecI key, VecI at) {
  VecI from;
  for (int j = 0; j < kLanes; ++j) from[j] = j ^ distance;
  const VecI other_key = __builtin_shuffle(key, from), other_at = __builtin_shuffle(at, from);
  const VecI other = (other_key > key) | ((other_key == key) & (other_at < at));
  key = other ? other_key : key;
  at = other ? other_at : at;
  if constexpr (distance == 1)
    return {key[0], at[0]};
  else
    return join_best<distance / 2>(key, at);
}

// The largest of keys[from, to), the first where there are several. Whole vectors are read.
inline Best best_of(const int32_t* keys, int64_t from, int64_t to) {
  const VecI none = splat_int(kNoKey), end = splat_int(static_cast<int32_t>(to));
  VecI best = none, where = end, at = lane_numbers() + static_cast<int32_t>(from);
  for (int64_t i = from; i < to; i += kLanes, at += kLanes) {
    VecI key = *reinterpret_cast<const VecIU*>(keys + i);
    key = at < end ? key : none;
    const VecI more = key > best;
    best = more ? key : best;
    where = more ? at : where;
  }
  return join_best(best, where);
}

// exp(x) for x <= 0; below 2^-126 it is zero.
inline VecF exp_to_one(VecF x) {
  const VecF power = x * kLog2E;
  return power < splat(-126.0f) ? VecF{} : exp2_clamped(power);
}

// The row in f32, filled up to whole vectors with what counts for nothing.
inline void read_logits(const void* logits, int64_t count, int64_t padded, DType dtype, float* row) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(row + i, get(logits, i, dtype));
  for (; i < count; ++i) row[i] = get_one(logits, i, dtype);
  for (; i < padded; ++i) row[i] = -__builtin_inff();
}

// In place. As by the formula, all are NaN where a logit is NaN or the largest is infinite.
inline void softmax_row(float* row, int64_t padded) {
  VecF most = splat(-__builtin_inff());
  VecI strange = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const VecF value = load(row + i);
    strange |= value != value;
    most = larger(most, value);
  }
  const float maximum = join_max(most);
  bool undefined = __builtin_isinf(maximum);
  for (int j = 0; j < kLanes; ++j) undefined |= strange[j] != 0;
  VecF sum = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const VecF weight = exp_to_one(load(row + i) - maximum);
    sum += weight;
    store(row + i, weight);
  }
  const float total = undefined ? __builtin_nanf("") : join_sum(sum);
  for (int64_t i = 0; i < padded; i += kLanes) store(row + i, load(row + i) / total);
}

inline void sigmoid_row(float* row, int64_t padded) {
  for (int64_t i = 0; i < padded; i += kLanes) {
    const VecF x = load(row + i), e = exp_to_one(x > 0.0f ? -x : x);
    const VecF share = (x > 0.0f ? splat(1.0f) : e) / (1.0f + e);
    store(row + i, x == x ? share : x);
  }
}

// Lets the keys of all groups but the best fall below every other. A group ranks by its best expert, or where there is a
// bias by the sum of its two best.
inline void keep_groups(const TopKRule& rule, int32_t* keys, int32_t* group_keys) {
  const int64_t size = rule.experts / rule.groups;
  for (int64_t group = 0; group < rule.groups; ++group) {
    const int64_t from = group * size;
    const Best best = best_of(keys, from, from + size);
    group_keys[group] = best.key;
    if (rule.bias == nullptr) continue;
    keys[best.at] = kNoKey;
    const Best second = best_of(keys, from, from + size);
    keys[best.at] = best.key;
    group_keys[group] = keys_of(splat(value_of(best.key) + value_of(second.key)))[0];
  }
  for (int64_t kept = 0; kept < rule.kept_groups; ++kept) group_keys[best_of(group_keys, 0, rule.groups).at] = kNoKey;
  for (int64_t group = 0; group < rule.groups; ++group)
    if (group_keys[group] != kNoKey)
      for (int64_t i = group * size; i < (group + 1) * size; ++i) keys[i] = kNoKey;
}

inline void rank(const float* row, const float* bias, int64_t padded, int32_t* keys) {
  for (int64_t i = 0; i < padded; i += kLanes) {
    const VecF score = load(row + i);
    *reinterpret_cast<VecIU*>(keys + i) = keys_of(bias == nullptr ? score : score + load(bias + i));
  }
}

// A row's scores, and the keys by which its experts rank. Without a bias those are logits: different ones may have equal
// scores.
inline void rank_row(const TopKRule& rule, const void* logits, DType dtype, float* row, int32_t* keys, int32_t* group_keys) {
  const int64_t padded = (rule.experts + kLanes - 1) / kLanes * kLanes;
  read_logits(logits, rule.experts, padded, dtype, row);
  if (rule.bias == nullptr) rank(row, nullptr, padded, keys);
  rule.sigmoid ? sigmoid_row(row, padded) : softmax_row(row, padded);
  if (rule.bias != nullptr) rank(row, rule.bias, padded, keys);
  if (rule.kept_groups < rule.groups) keep_groups(rule, keys, group_keys);
}

// Each choice of a row waits for the one before it: so the rows take turns.
void choose(const TopKRule& rule, const TopKRows& rows, const TopKScratch& scratch) {
  const int64_t room = rule.experts + kPanel;
  for (int64_t r = 0; r < rows.count; ++r)
    rank_row(rule, static_cast<const char*>(rows.logits) + r * rows.stride, rows.dtype, scratch.scores + r * room,
             scratch.keys + r * room, scratch.group_keys);
  for (int64_t k = 0; k < rule.top_k; ++k)
    for (int64_t r = 0; r < rows.count; ++r) {
      int32_t* keys = scratch.keys + r * room;
      const int32_t at = best_of(keys, 0, rule.experts).at;
      keys[at] = kNoKey;
      rows.ids[r * rule.top_k + k] = at;
      rows.weights[r * rule.top_k + k] = scratch.scores[r * room + at];
    }
  if (!rule.renormalize) return;
  for (int64_t r = 0; r < rows.count; ++r) {
    float* weights = rows.weights + r * rule.top_k;
    float sum = 0.0f;
    for (int64_t k = 0; k < rule.top_k; ++k) sum += weights[k];
    for (int64_t k = 0; k < rule.top_k; ++k) weights[k] /= sum;
  }
}

}  // namespace
}  // namespace sgl_batch
