// Owns the record of a pass: native calls with their arguments, which run again on what the same memory holds by then.
// Between two calls of a pass over few rows, an interpreter takes longer than some of the calls themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sgl_batch {

class Record {
 public:
  // Computes again with the first `rows` rows.
  using Run = std::function<void(int64_t rows)>;

  explicit Record(int64_t rows) : rows_(rows) {}

  void add(const char* name, int64_t rows, std::initializer_list<at::Tensor> tensors, Run run) {
    if (rows != rows_) whole_ = false;
    calls_.push_back({name, std::move(run)});
    tensors_.insert(tensors_.end(), tensors);
  }

  int64_t rows() const { return rows_; }
  // Whether every call took all rows: then they can be run with fewer.
  bool whole() const { return whole_; }

  // The operators that were called.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const Call& call : calls_) all.emplace_back(call.name);
    return all;
  }

  // Calls them with the first `rows` rows; returns the seconds of each call.
  std::vector<double> run(int64_t rows) const {
    std::vector<double> seconds;
    auto begun = std::chrono::steady_clock::now();
    for (const Call& call : calls_) {
      call.run(rows);
      const auto now = std::chrono::steady_clock::now();
      seconds.push_back(std::chrono::duration<double>(now - begun).count());
      begun = now;
    }
    return seconds;
  }

 private:
  struct Call {
    const char* name;
    Run run;
  };
  std::vector<Call> calls_;
  std::vector<at::Tensor> tensors_;  // of the calls: they keep their memory
  const int64_t rows_;
  bool whole_ = true;
};

// What this thread records, or null.
Record* recording();

// Runs a call that has all its `rows`, and records it where this thread records. `tensors`: all that it reads and writes.
// `check`: whether what it reads may be read, for so many rows. The caller has checked it for the first time.
template <typename Run, typename Check>
void run_and_record(const char* name, int64_t rows, std::initializer_list<at::Tensor> tensors, const Run& run, const Check& check) {
  run(rows);
  if (Record* record = recording())
    record->add(name, rows, tensors, [run, check](int64_t some) {
      check(some);
      run(some);
    });
}

// The same for a call that has its rows at `rows`, and that may read whatever its tensors hold.
template <typename Call>
void run_and_record(const char* name, const Call& call, int64_t Call::*rows, void (*run)(const Call&),
                    std::initializer_list<at::Tensor> tensors) {
  const auto with = [call, rows, run](int64_t some) {
    Call own = call;
    own.*rows = some;
    run(own);
  };
  run_and_record(name, call.*rows, tensors, with, [](int64_t) {});
}

inline at::Tensor or_none(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

}  // namespace sgl_batch
