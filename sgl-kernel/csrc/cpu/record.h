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

// While a record runs: how many rows the pass has, and how many the next call has, which are others between a dispatch and
// a combine; and how long its calls have waited for other ranks.
struct RecordRows {
  int64_t own, here, waited_ns;
};

class Record {
 public:
  // Computes again with the first rows.
  using Run = std::function<void(RecordRows& rows)>;

  explicit Record(int64_t rows) : rows_(rows), here_(rows) {}

  // `fits`: whether the call can have more rows than now, if it is over rows that came from other ranks.
  void add(const char* name, int64_t rows, std::vector<at::Tensor> tensors, Run run, bool fits = false) {
    if (rows != here_ || (sums_.defined() && !fits)) whole_ = false;
    calls_.push_back({name, std::move(run)});
    tensors_.insert(tensors_.end(), tensors.begin(), tensors.end());
  }

  // From now on calls have rows that came from other ranks, as many as there are `sums`, where what experts give belongs: its
  // memory has room for all that can come. Until the pass goes on with its own rows.
  void go_on_with_received(const at::Tensor& sums) { here_ = sums.size(0), sums_ = sums; }
  void go_on_with_own() { here_ = rows_, sums_ = at::Tensor(); }
  // Undefined where calls have the pass's own rows.
  const at::Tensor& sums() const { return sums_; }

  int64_t rows() const { return rows_; }
  // Whether every call took all rows: then they can be run with fewer, and with others that came.
  bool whole() const { return whole_; }

  // The operators that were called.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const Call& call : calls_) all.emplace_back(call.name);
    return all;
  }

  // Calls them with the first `rows` rows; returns the seconds of each call, and adds to those waited for other ranks.
  std::vector<double> run(int64_t own, int64_t& waited_ns) const {
    std::vector<double> seconds;
    RecordRows rows{own, own, 0};
    auto begun = std::chrono::steady_clock::now();
    for (const Call& call : calls_) {
      call.run(rows);
      const auto now = std::chrono::steady_clock::now();
      seconds.push_back(std::chrono::duration<double>(now - begun).count());
      begun = now;
    }
    waited_ns += rows.waited_ns;
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
  int64_t here_;     // rows of the next call
  at::Tensor sums_;  // see go_on_with_received
  bool whole_ = true;
};

// What this thread records, or null.
Record* recording();

// Runs a call that has all its `rows`, and records it where this thread records. `tensors`: all that it reads and writes.
// `check`: whether what it reads may be read, for so many rows. The caller has checked it for the first time.
template <typename Run, typename Check>
void run_and_record(const char* name, int64_t rows, std::initializer_list<at::Tensor> tensors, const Run& run, const Check& check,
                    bool fits = false) {
  run(rows);
  if (Record* record = recording())
    record->add(name, rows, tensors, [run, check](const RecordRows& some) {
      check(some.here);
      run(some.here);
    }, fits);
}

// The same for a call that has its rows at `rows`, and that may read whatever its tensors hold.
template <typename Call>
void run_and_record(const char* name, const Call& call, int64_t Call::*rows, void (*run)(const Call&),
                    std::initializer_list<at::Tensor> tensors, bool fits = false) {
  const auto with = [call, rows, run](int64_t some) {
    Call own = call;
    own.*rows = some;
    run(own);
  };
  run_and_record(name, call.*rows, tensors, with, [](int64_t) {}, fits);
}

// The memory for what experts give, [rows, columns]: new, or where this thread's record has it. The call that is recorded then
// `fits` if it reads nothing else that has as many rows but what a dispatch gives.
at::Tensor experts_out(int64_t rows, int64_t columns, const at::TensorOptions& options);
inline bool is_in_record(const at::Tensor& out) {
  return recording() != nullptr && recording()->sums().defined() && recording()->sums().data_ptr() == out.data_ptr();
}

inline at::Tensor or_none(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

}  // namespace sgl_batch
