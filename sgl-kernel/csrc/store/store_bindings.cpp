// Owns the store and its copy engine as torch sees them: classes of sgl_batch_kernel. Nothing is decided here.
// GCC 12 takes the reference counts in torch's own headers for memory of no size.
#pragma GCC diagnostic ignored "-Wstringop-overflow"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "copy_engine.h"

namespace sgl_batch {
namespace {

using Numbers = std::vector<int64_t>;

// What a caller did wrong is a ValueError, what the system refused a RuntimeError.
template <typename Call>
auto guarded(const Call& call) {
  try {
    return call();
  } catch (const StoreFault& fault) {
    TORCH_CHECK_VALUE(false, fault.what());
  } catch (const std::invalid_argument& fault) {
    TORCH_CHECK_VALUE(false, fault.what());
  } catch (const std::logic_error& fault) {
    TORCH_CHECK_VALUE(false, fault.what());
  }
}

const int64_t* numbers_in(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous() && tensor.scalar_type() == at::kLong && tensor.is_cpu(), name,
                    " are ", tensor.scalar_type(), tensor.sizes(), "; use contiguous int64 [N] on the CPU");
  return tensor.data_ptr<int64_t>();
}

Numbers copied(const at::Tensor& tensor, const char* name) {
  const int64_t* begin = numbers_in(tensor, name);
  return {begin, begin + tensor.numel()};
}

class Store : public torch::CustomClassHolder {
 public:
  // `data_fd`: of a file where `name` is not empty, else of shared memory, or -1 for memory of this process alone.
  Store(int64_t table_fd, bool create, const Numbers& geometry, int64_t num_ranks, int64_t rank, int64_t data_fd,
        std::string name)
      : table(guarded([&] {
          return std::make_shared<SlotTable>(static_cast<int>(table_fd), create, geometry, static_cast<int>(num_ranks),
                                             static_cast<int>(rank));
        })) {
    const int64_t bytes = table->geometry().num_slots * table->geometry().slot_bytes;
    medium = name.empty() ? memory_medium(static_cast<int>(data_fd), bytes)
                          : file_medium(static_cast<int>(data_fd), std::move(name));
  }

  void enter(int64_t pid, int64_t start) {
    guarded([&] { table->enter(pid, start); });
  }

  std::vector<Numbers> occupants() {
    std::vector<Numbers> found;
    for (const auto& [pid, start] : table->occupants()) found.push_back({pid, start});
    return found;
  }

  at::Tensor take(int64_t count) {
    const Numbers taken = guarded([&] { return table->take(count); });
    auto slots = at::empty({static_cast<int64_t>(taken.size())}, at::kLong);
    std::copy(taken.begin(), taken.end(), slots.data_ptr<int64_t>());
    return slots;
  }

  void complete(const at::Tensor& slots) {
    guarded([&] { table->complete(numbers_in(slots, "slots"), slots.numel()); });
  }
  void share(const at::Tensor& slots) {
    guarded([&] { table->share(numbers_in(slots, "slots"), slots.numel()); });
  }
  void free(const at::Tensor& slots) {
    guarded([&] { table->free(numbers_in(slots, "slots"), slots.numel()); });
  }
  int64_t reclaim(int64_t rank) {
    return guarded([&] { return table->reclaim(static_cast<int>(rank)); });
  }

  void begin_copies(const at::Tensor& slots, bool to_slots) {
    guarded([&] { table->begin_copies(numbers_in(slots, "slots"), slots.numel(), to_slots); });
  }
  void end_copies(const at::Tensor& slots) { table->end_copies(numbers_in(slots, "slots"), slots.numel()); }

  std::tuple<int64_t, int64_t, int64_t, int64_t> counts() {
    const SlotCounts found = table->counts();
    return {found.free, found.writing, found.ready, found.recoveries};
  }

  std::tuple<at::Tensor, at::Tensor> describe(const at::Tensor& slots) {
    auto states = at::empty_like(slots), references = at::empty_like(slots);
    guarded([&] {
      table->describe(numbers_in(slots, "slots"), slots.numel(), states.data_ptr<int64_t>(), references.data_ptr<int64_t>());
    });
    return {states, references};
  }

  void audit() {
    guarded([&] { table->audit(); });
  }

  // All bytes of a store in memory, as uint8; they stay as long as this tensor does.
  at::Tensor memory() {
    TORCH_CHECK_VALUE(medium->memory() != nullptr, "a store in a file has no memory");
    const int64_t bytes = table->geometry().num_slots * table->geometry().slot_bytes;
    return at::from_blob(medium->memory(), {bytes}, [kept = medium](void*) {}, at::kByte);
  }

  std::shared_ptr<SlotTable> table;
  std::shared_ptr<Medium> medium;
};

class Ticket : public torch::CustomClassHolder {
 public:
  Ticket(std::shared_ptr<CopyEngine> engine, Operation operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}

  int64_t state() { return static_cast<int64_t>(operation_->end.load(std::memory_order_acquire)); }
  bool wait(double timeout_s) { return engine_->wait(operation_, timeout_s); }
  bool cancel() { return engine_->cancel(operation_); }
  std::tuple<int64_t, std::string> error() {
    TORCH_CHECK_VALUE(state() == static_cast<int64_t>(CopyEnd::kFailed), "this copy has not failed");
    return {operation_->error_number, operation_->error};
  }

 private:
  std::shared_ptr<CopyEngine> engine_;
  Operation operation_;
};

class Engine : public torch::CustomClassHolder {
 public:
  // `parts`: layer by layer, each [num_pages, ...]. The caller keeps them alive until `close`.
  Engine(const c10::intrusive_ptr<Store>& store, const std::vector<at::Tensor>& parts, int64_t num_workers,
         int64_t most_operations, int64_t most_bytes) {
    TORCH_CHECK_VALUE(num_workers > 0 && most_operations > 0 && most_bytes > 0, "a copy engine of ", num_workers,
                      " workers, ", most_operations, " operations and ", most_bytes, " bytes");
    TORCH_CHECK_VALUE(!parts.empty(), "a copy engine without device pages");
    const auto& bytes = store->table->geometry().part_bytes;
    DevicePages device{{}, parts[0].size(0)};
    for (size_t i = 0; i < parts.size(); ++i) {
      const at::Tensor& part = parts[i];
      TORCH_CHECK_VALUE(part.is_contiguous() && part.is_cpu() && part.dim() > 0 && part.size(0) == device.num_pages &&
                            static_cast<int64_t>(part.nbytes()) == device.num_pages * bytes[i % bytes.size()],
                        "part ", i, " of the device pages is ", part.scalar_type(), part.sizes(), "; the store is for ",
                        device.num_pages, " contiguous pages of ", bytes[i % bytes.size()], " bytes");
      device.parts.push_back(static_cast<char*>(part.data_ptr()));
    }
    engine_ = guarded([&] {
      return std::make_shared<CopyEngine>(store->table, store->medium, std::move(device),
                                          CopyLimits{static_cast<int>(num_workers), most_operations, most_bytes});
    });
  }

  c10::intrusive_ptr<Ticket> submit(bool to_slots, int64_t first_layer, int64_t last_layer, const at::Tensor& pages,
                                    const at::Tensor& slots) {
    return c10::make_intrusive<Ticket>(engine_, guarded([&] {
                                         return engine_->submit(to_slots, first_layer, last_layer, copied(pages, "pages"),
                                                                copied(slots, "slots"));
                                       }));
  }

  void close() { engine_->close(); }

  Numbers totals() {
    const CopyTotals t = engine_->totals();
    return {t.stored_bytes, t.loaded_bytes, t.stored_pages, t.loaded_pages, t.operations,
            t.errors,       t.cancelled,    t.busy_ns,      t.submit_ns,    t.wait_ns};
  }

 private:
  std::shared_ptr<CopyEngine> engine_;
};

}  // namespace
}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  using sgl_batch::Engine;
  using sgl_batch::Store;
  using sgl_batch::Ticket;
  library.class_<Store>("Store")
      .def(torch::init<int64_t, bool, const std::vector<int64_t>&, int64_t, int64_t, int64_t, std::string>())
      .def("enter", &Store::enter)
      .def("occupants", &Store::occupants)
      .def("take", &Store::take)
      .def("complete", &Store::complete)
      .def("share", &Store::share)
      .def("free", &Store::free)
      .def("reclaim", &Store::reclaim)
      .def("begin_copies", &Store::begin_copies)
      .def("end_copies", &Store::end_copies)
      .def("counts", &Store::counts)
      .def("describe", &Store::describe)
      .def("audit", &Store::audit)
      .def("memory", &Store::memory);
  library.class_<Ticket>("CopyTicket")
      .def("state", &Ticket::state)
      .def("wait", &Ticket::wait)
      .def("cancel", &Ticket::cancel)
      .def("error", &Ticket::error);
  library.class_<Engine>("CopyEngine")
      .def(torch::init<const c10::intrusive_ptr<Store>&, const std::vector<at::Tensor>&, int64_t, int64_t, int64_t>())
      .def("submit", &Engine::submit)
      .def("close", &Engine::close)
      .def("totals", &Engine::totals);
}
