#include "record.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace sgl_batch {
namespace {

thread_local std::unique_ptr<Record> current;

// The records that are kept, by their numbers.
std::mutex mutex;
std::map<int64_t, std::shared_ptr<const Record>>& kept() {
  static auto* records = new std::map<int64_t, std::shared_ptr<const Record>>;
  return *records;
}

void record_begin(int64_t rows) {
  TORCH_CHECK(current == nullptr, "this thread records already");
  TORCH_CHECK(rows >= 0, "a record has ", rows, " rows; use at least 0");
  current = std::make_unique<Record>(rows);
}

// Ends recording; returns the number of the record, or -1 if it was dropped: on request, or where it is of no use.
int64_t record_end(bool keep) {
  TORCH_CHECK(current != nullptr, "this thread records nothing");
  const std::shared_ptr<const Record> done = std::move(current);
  if (!keep || !done->whole()) return -1;
  static int64_t last = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  kept()[++last] = done;
  return last;
}

std::shared_ptr<const Record> found(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = kept().find(number);
  TORCH_CHECK(at != kept().end(), "there is no record ", number);
  return at->second;
}

std::vector<std::string> record_names(int64_t number) { return found(number)->names(); }

std::tuple<std::vector<double>, int64_t> record_run(int64_t number, int64_t rows) {
  const auto record = found(number);
  TORCH_CHECK(rows >= 0 && rows <= record->rows(), "a record of ", record->rows(), " rows cannot run with ", rows);
  int64_t waited_ns = 0;
  std::vector<double> seconds = record->run(rows, waited_ns);
  return {std::move(seconds), waited_ns};
}

void record_drop(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  kept().erase(number);
}

}  // namespace

Record* recording() { return current.get(); }

at::Tensor experts_out(int64_t rows, int64_t columns, const at::TensorOptions& options) {
  if (recording() != nullptr && recording()->sums().defined()) {
    const at::Tensor& sums = recording()->sums();
    if (sums.size(0) == rows && sums.size(1) == columns && sums.scalar_type() == c10::typeMetaToScalarType(options.dtype())) return sums;
  }
  return at::empty({rows, columns}, options);
}

}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("record_begin(int rows) -> ()", sgl_batch::record_begin);
  library.def("record_end(bool keep) -> int", sgl_batch::record_end);
  library.def("record_names(int number) -> str[]", sgl_batch::record_names);
  library.def("record_run(int number, int rows) -> (float[], int)", sgl_batch::record_run);
  library.def("record_drop(int number) -> ()", sgl_batch::record_drop);
}
