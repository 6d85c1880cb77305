#include "record.h"

#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>

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
  TORCH_CHECK(rows > 0, "a record has ", rows, " rows; use at least 1");
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

std::vector<double> record_run(int64_t number, int64_t rows) {
  const auto record = found(number);
  TORCH_CHECK(rows > 0 && rows <= record->rows(), "a record of ", record->rows(), " rows cannot run with ", rows);
  return record->run(rows);
}

void record_drop(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  kept().erase(number);
}

}  // namespace

Record* recording() { return current.get(); }

}  // namespace sgl_batch

TORCH_LIBRARY_FRAGMENT(sgl_batch_kernel, library) {
  library.def("record_begin(int rows) -> ()", sgl_batch::record_begin);
  library.def("record_end(bool keep) -> int", sgl_batch::record_end);
  library.def("record_names(int number) -> str[]", sgl_batch::record_names);
  library.def("record_run(int number, int rows) -> float[]", sgl_batch::record_run);
  library.def("record_drop(int number) -> ()", sgl_batch::record_drop);
}
