// Owns writing new keys and values into pages in the packed order that attention reads.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "tasks.h"
#include "tensor_checks.h"

namespace sgl_batch {
namespace {

constexpr int64_t kTokensPerTask = 64;

// Pages of keys are [heads][page / width][dim / step][width][step] with `width` tokens a panel, and pages of values
// [heads][dim / width][page / step][width][step] with `width` channels a panel. Elements have 2 or 4 bytes.
struct PageWriteCall {
  int64_t tokens, heads, dim, page, key_width, value_width, step;
  size_t element;
  void* k_pages;
  void* v_pages;
  const int64_t* slots;  // [tokens] page * page size + offset
  const void* keys;      // [tokens] rows of [heads][dim]
  const void* values;
  int64_t key_stride, value_stride;  // elements from token to token
};

template <typename Element>
void write_token(const PageWriteCall& c, int64_t token) {
  const int64_t page = c.slots[token] / c.page, offset = c.slots[token] % c.page;
  const int64_t head_size = c.page * c.dim, begin = page * c.heads * head_size;
  const auto* key = static_cast<const Element*>(c.keys) + token * c.key_stride;
  const auto* value = static_cast<const Element*>(c.values) + token * c.value_stride;
  const int64_t panel = offset / c.key_width * c.key_width * c.dim, column = offset % c.key_width;
  for (int64_t head = 0; head < c.heads; ++head, key += c.dim, value += c.dim) {
    auto* to = static_cast<Element*>(c.k_pages) + begin + head * head_size + panel + column * c.step;
    for (int64_t d = 0; d < c.dim; d += c.step)
      for (int64_t half = 0; half < c.step; ++half) to[d * c.key_width + half] = key[d + half];
    to = static_cast<Element*>(c.v_pages) + begin + head * head_size + offset / c.step * c.value_width * c.step + offset % c.step;
    for (int64_t d = 0; d < c.dim; d += c.value_width, to += c.page * c.value_width)
      for (int64_t i = 0; i < c.value_width; ++i) to[i * c.step] = value[d + i];
  }
}

void run_page_write(const PageWriteCall& call) {
  run_tasks(divide_up(call.tokens, kTokensPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(call.tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token)
      call.element == 2 ? write_token<uint16_t>(call, token) : write_token<uint32_t>(call, token);
  });
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
  TORCH_CHECK(k_pages.scalar_type() == v_pages.scalar_type() && (k_pages.element_size() == 2 || k_pages.element_size() == 4),
              "pages of keys are ", k_pages.scalar_type(), " and of values ", v_pages.scalar_type());
  const auto* slot = slots.data_ptr<int64_t>();
  for (int64_t i = 0; i < slots.size(0); ++i)
    TORCH_CHECK(slot[i] >= 0 && slot[i] < pages * page, "slot ", slot[i], " of ", pages * page);
  run_page_write({slots.size(0), heads, dim, page, key_width, value_width, step, static_cast<size_t>(k_pages.element_size()),
                  k_pages.data_ptr(), v_pages.data_ptr(), slot, keys.data_ptr(), values.data_ptr(), keys.stride(0),
                  values.stride(0)});
}

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("write_pages(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots, Tensor keys, Tensor values) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_batch_kernel, CPU, library) { library.impl("write_pages", sgl_batch::write_pages); }
