// Owns writing new keys and values into pages in the packed order that attention reads.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "record.h"
#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kMostTokensPerTask = 64, kLeastTokensPerTask = 16;

// Pages of keys are [heads][page / width][dim / step][width][step] with `width` tokens a panel, and pages of values
// [heads][dim / width][page / step][width][step] with `width` channels a panel. `step` numbers are one word of 4 bytes:
// two channels of a token's keys, or one channel of two tokens' values, or a single f32.
struct PageWriteCall {
  int64_t tokens, heads, dim, page, key_width, value_width, step;
  char* k_pages;
  char* v_pages;
  const int64_t* slots;  // [tokens] page * page size + offset
  const char* keys;      // [tokens] rows of [heads][dim]
  const char* values;
  int64_t key_stride, value_stride;  // bytes from token to token
};
constexpr int64_t kWord = 4;

// Tokens at `offset` of a page and behind it, one head of each: `from` are their rows, `to` is the head's part of the page.
void write_keys(const PageWriteCall& c, const char* from, int64_t offset, int64_t count, char* to) {
  const int64_t words = c.dim / c.step;
  while (count > 0) {
    const int64_t column = offset % c.key_width, some = std::min(count, c.key_width - column);
    isa().transpose_words(from, c.key_stride, some, words, to + ((offset - column) * words + column) * kWord,
                          c.key_width * kWord);
    from += some * c.key_stride;
    offset += some;
    count -= some;
  }
}

// A token whose neighbour in the pair comes from elsewhere, perhaps at this very moment: only its own half is touched.
void write_lone_value(const PageWriteCall& c, const uint16_t* from, uint16_t* to) {
  for (int64_t d = 0; d < c.dim; d += c.value_width, to += c.page * c.value_width)
    for (int64_t i = 0; i < c.value_width; ++i) to[2 * i] = from[d + i];
}

// A whole word for each channel: one token's f32, or the bf16 of two tokens.
void write_value_words(const PageWriteCall& c, const char* from, char* to) {
  const int64_t row = c.value_width * kWord / c.step;
  for (int64_t d = 0; d < c.dim; d += c.value_width, from += row, to += c.page / c.step * c.value_width * kWord)
    if (c.step == 1)
      std::memcpy(to, from, static_cast<size_t>(row));
    else
      isa().zip_halves(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<const uint16_t*>(from + c.value_stride),
                       c.value_width, reinterpret_cast<uint16_t*>(to));
}

void write_values(const PageWriteCall& c, const char* from, int64_t offset, int64_t count, char* to) {
  while (count > 0) {
    const bool lone = c.step == 2 && (offset % 2 == 1 || count == 1);
    char* place = to + offset / c.step * c.value_width * kWord + offset % c.step * (kWord / 2);
    if (lone)
      write_lone_value(c, reinterpret_cast<const uint16_t*>(from), reinterpret_cast<uint16_t*>(place));
    else
      write_value_words(c, from, place);
    const int64_t some = lone ? 1 : c.step;
    from += some * c.value_stride;
    offset += some;
    count -= some;
  }
}

// Tokens that follow each other in one page.
void write_run(const PageWriteCall& c, int64_t token, int64_t count) {
  const int64_t page = c.slots[token] / c.page, offset = c.slots[token] % c.page;
  const int64_t row = c.dim * kWord / c.step, size = c.page * row;
  for (int64_t head = 0; head < c.heads; ++head) {
    const int64_t begin = (page * c.heads + head) * size;
    write_keys(c, c.keys + token * c.key_stride + head * row, offset, count, c.k_pages + begin);
    write_values(c, c.values + token * c.value_stride + head * row, offset, count, c.v_pages + begin);
  }
}

// Brings what a token's keys and values go to closer. In a decode step every token has a page of its own, and each of its
// channels another line of it: they would be waited for one by one.
void fetch_places(const PageWriteCall& c, int64_t token) {
  const int64_t page = c.slots[token] / c.page, offset = c.slots[token] % c.page;
  const int64_t words = c.dim / c.step, size = c.page * words * kWord, column = offset % c.key_width;
  for (int64_t head = 0; head < c.heads; ++head) {
    const int64_t begin = (page * c.heads + head) * size;
    const char* keys = c.k_pages + begin + ((offset - column) * words + column) * kWord;
    for (int64_t word = 0; word < words; ++word) __builtin_prefetch(keys + word * c.key_width * kWord, 1, 3);
    const char* values = c.v_pages + begin + offset / c.step * c.value_width * kWord;
    for (int64_t d = 0; d < c.dim; d += c.value_width, values += c.page / c.step * c.value_width * kWord)
      for (int64_t at = 0; at < c.value_width * kWord; at += kLineBytes) __builtin_prefetch(values + at, 1, 3);
  }
  asm volatile("");  // as in fetch(): else the call is left out
}

// How many tokens from the given one on follow each other in one page.
int64_t run_length(const PageWriteCall& c, int64_t token, int64_t end) {
  const int64_t slot = c.slots[token];
  const int64_t most = std::min(end - token, c.page - slot % c.page);
  int64_t count = 1;
  while (count < most && c.slots[token + count] == slot + count) ++count;
  return count;
}

void run_page_write(const PageWriteCall& call) {
  const int64_t each = call.tokens / (kTasksPerThread * num_threads());
  const int64_t per_task = std::clamp(round_up(each, kLeastTokensPerTask), kLeastTokensPerTask, kMostTokensPerTask);
  run_tasks(divide_up(call.tokens, per_task), [&](int64_t task, int) {
    const int64_t end = std::min(call.tokens, (task + 1) * per_task);
    for (int64_t token = task * per_task, count; token < end; token += count) {
      count = run_length(call, token, end);
      if (count == 1 && token + 1 < end) fetch_places(call, token + 1);
      write_run(call, token, count);
    }
  });
}

// Checks the first slots of so many rows.
auto slot_check(const int64_t* first, int64_t size) {
  return [first, size](int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) TORCH_CHECK(first[i] >= 0 && first[i] < size, "slot ", first[i], " of ", size);
  };
}

void write_pages(at::Tensor k_pages, at::Tensor v_pages, const at::Tensor& slots, const at::Tensor& keys,
                 const at::Tensor& values) {
  check(k_pages, 6, "k_pages");
  check(v_pages, 6, "v_pages");
  check_index(slots, "slots");
  const int64_t pages = k_pages.size(0), heads = k_pages.size(1), key_width = k_pages.size(4), step = k_pages.size(5);
  const int64_t page = k_pages.size(2) * key_width, dim = k_pages.size(3) * step, value_width = v_pages.size(4);
  TORCH_CHECK(v_pages.size(0) == pages && v_pages.size(1) == heads && v_pages.size(2) * value_width == dim &&
                  v_pages.size(3) * step == page && v_pages.size(5) == step,
              "pages of keys are ", k_pages.sizes(), " and of values ", v_pages.sizes());
  for (const auto* rows : {&keys, &values})
    TORCH_CHECK(rows->dim() == 3 && rows->size(0) == slots.size(0) && rows->size(1) == heads && rows->size(2) == dim &&
                    rows->scalar_type() == k_pages.scalar_type() && rows->stride(2) == 1 && rows->stride(1) == dim,
                "rows are ", rows->scalar_type(), rows->sizes(), " with strides ", rows->strides(), " for ", slots.size(0),
                " slots and pages of ", k_pages.scalar_type(), k_pages.sizes());
  const int64_t element = k_pages.element_size();
  TORCH_CHECK(k_pages.scalar_type() == v_pages.scalar_type() && (step == 1 || step == 2) && element * step == kWord,
              "pages of keys are ", k_pages.scalar_type(), k_pages.sizes(), " and of values ", v_pages.scalar_type());
  const PageWriteCall call{slots.size(0), heads, dim, page, key_width, value_width, step, static_cast<char*>(k_pages.data_ptr()),
                           static_cast<char*>(v_pages.data_ptr()), slots.data_ptr<int64_t>(),
                           static_cast<const char*>(keys.data_ptr()), static_cast<const char*>(values.data_ptr()),
                           keys.stride(0) * element, values.stride(0) * element};
  const auto check = slot_check(call.slots, pages * page);
  const auto run = [call](int64_t rows) {
    PageWriteCall own = call;
    own.tokens = rows;
    run_page_write(own);
  };
  check(call.tokens);
  run_and_record("write_pages", call.tokens, {k_pages, v_pages, slots, keys, values}, run, check);
}

void write_rows(at::Tensor table, const at::Tensor& slots, const at::Tensor& rows) {
  check(table, 2, "table");
  check_index(slots, "slots");
  TORCH_CHECK(rows.dim() == 2 && rows.size(0) == slots.size(0) && rows.size(1) == table.size(1) &&
                  rows.scalar_type() == table.scalar_type() && rows.stride(1) == 1,
              "rows are ", rows.scalar_type(), rows.sizes(), " with strides ", rows.strides(), " for ", slots.size(0),
              " slots and a table of ", table.scalar_type(), table.sizes());
  const int64_t bytes = table.size(1) * table.element_size(), stride = rows.stride(0) * rows.element_size();
  const auto* const from = static_cast<const char*>(rows.data_ptr());
  auto* const to = static_cast<char*>(table.data_ptr());
  const auto* const first = slots.data_ptr<int64_t>();
  const auto run = [=](int64_t count) {
    run_tasks(divide_up(count, kMostTokensPerTask), [&](int64_t task, int) {
      const int64_t end = std::min(count, (task + 1) * kMostTokensPerTask);
      for (int64_t row = task * kMostTokensPerTask; row < end; ++row)
        std::memcpy(to + first[row] * bytes, from + row * stride, static_cast<size_t>(bytes));
    });
  };
  const auto check = slot_check(first, table.size(0));
  check(slots.size(0));
  run_and_record("write_rows", slots.size(0), {table, slots, rows}, run, check);
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("write_rows(Tensor(a!) table, Tensor slots, Tensor rows) -> ()");
  library.def("write_pages(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots, Tensor keys, Tensor values) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) {
  library.impl("write_rows", sgl_batch::write_rows);
  library.impl("write_pages", sgl_batch::write_pages);
}
