// Owns filling slots with experts from a checkpoint: threads that read plain matrices and pack them. Which expert goes
// where, and when, is the caller's.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/fp8.h"
#include "../cpu/gemm.h"
#include "../cpu/int8_groups.h"
#include "four_bit_numbers.h"
#include "weight_file.h"

namespace sgl_batch {

// Scales of the matrices in files of fp8 and int8, of all experts: `count` numbers. Blocks of `rows` x `columns` share one; 0 stands
// for all.
struct StoredScales {
  const float* data = nullptr;
  int64_t count = 0, rows = 0, columns = 0;
};

// How many numbers of an output have one scale, where they are bytes; 0 for other number types.
constexpr int64_t byte_group(DType dtype) { return fp8_group(dtype) + int8_group(dtype); }

// What the slots are made of: per slot a packed gate and up matrix [inter, hidden] each, one after the other in `w13`, and
// a packed [hidden, inter] in `w2`. Slots of int8 have scales, as in ExpertsCall. Matrices in files are plain, of `stored`;
// `transposed` ones have a row for each input, and columns of gate and up alternate in one matrix [hidden, 2 * inter]. Where
// slots are of fp8 or of int8 in groups, files have rows of bytes; where of int4 or fp4, what `four_bits` says.
struct ExpertSlots {
  int64_t count, hidden, inter;
  DType stored, dtype;
  bool transposed;
  char* w13;
  char* w2;
  float* w13_scales;
  float* w2_scales;
  StoredScales stored_scales = {};
  FourBitNumbers four_bits = {};

  bool are_int4() const { return int4_group(dtype) != 0; }
  int64_t stored_bytes(int64_t numbers) const { return byte_group(dtype) != 0 ? numbers : packed_bytes(stored, numbers); }
};

struct FilePlace {
  int64_t file = 0, offset = 0;
};
// `scale`: of fp8 and int8, which of the stored scales is the matrix's first. `scales`, `zeros`: of four bits, where theirs lie.
struct MatrixPlace {
  FilePlace numbers;
  int64_t scale = 0;
  FilePlace scales = {}, zeros = {};
};
using ExpertPlaces = std::array<MatrixPlace, 3>;  // gate, up, down; that of up is not read where matrices are transposed

enum class SlotLoad : uint8_t { kEmpty, kQueued, kLoading, kReady, kFailed };

struct LoaderTotals {
  int64_t bytes = 0, experts = 0, dropped = 0, errors = 0, read_ns = 0, pack_ns = 0, wait_ns = 0;
};

// A slot of which an expert is wanted is not asked for another until that one is there, has failed or was dropped. Throws
// std::invalid_argument for that, and for slots and files that do not exist; nothing has changed then.
class ExpertLoader {
 public:
  // `direct`, `keeps_cached`: as in WeightFile.
  ExpertLoader(const std::vector<std::string>& files, bool direct, bool keeps_cached, ExpertSlots slots, int num_threads);
  ExpertLoader(const ExpertLoader&) = delete;
  ExpertLoader& operator=(const ExpertLoader&) = delete;
  ~ExpertLoader();

  // Asks for experts; urgent ones come before all that are not.
  void submit(const std::vector<int64_t>& slots, const std::vector<ExpertPlaces>& places, bool urgent);

  // Lets what is already asked for come before others.
  void hurry(const std::vector<int64_t>& slots);

  // Leaves out what no thread has begun: 1 for each slot that is empty now.
  std::vector<uint8_t> drop(const std::vector<int64_t>& slots);

  // Returns when all these slots are filled. Throws ReadFault with what went wrong first.
  void wait(const std::vector<int64_t>& slots);

  bool direct() const;
  LoaderTotals totals();
  void close();

 private:
  struct Slot {
    SlotLoad state = SlotLoad::kEmpty;
    ExpertPlaces places{};
    std::string error;
    int error_number = 0;
  };

  // A packed matrix [n, k] of a slot.
  struct Target {
    int64_t n, k;
    char* to;
    float* scales;
  };
  // A thread's own memory. `staged` holds a transposed matrix that becomes int8: an output's scale depends on all inputs.
  struct Thread {
    ReadBuffer buffer;
    std::vector<char> staged, scales;
    LoaderTotals totals;
  };

  void check(const std::vector<int64_t>& slots) const;
  void work(std::vector<char> staged);
  std::string fill(int64_t slot, const ExpertPlaces& places, Thread& own, int& error_number);
  void load(int64_t slot, const ExpertPlaces& places, Thread& own);
  const char* read(const FilePlace& place, int64_t skipped, int64_t bytes, Thread& own);
  // Reads so many rows of a file, a multiple of `together` at a time but at their end, and calls pack(plain, first row, rows).
  template <typename Pack>
  void each_chunk(const FilePlace& place, int64_t rows, int64_t row_bytes, int64_t together, Thread& own, const Pack& pack);
  void load_rows(const MatrixPlace& place, const Target& target, Thread& own);
  void pack(const char* plain, const MatrixPlace& place, int64_t first, int64_t rows, const Target& target) const;
  bool has_scales(const ExpertPlaces& places) const;
  void load_integers(const MatrixPlace& place, const Target& target, Thread& own);
  void load_mxfp4(const MatrixPlace& place, const Target* targets, int64_t count, Thread& own);
  void load_columns(const MatrixPlace& place, const Target* targets, int64_t count, Thread& own);

  std::vector<std::unique_ptr<WeightFile>> files_;
  const ExpertSlots slots_;
  std::vector<Slot> table_;
  std::deque<int64_t> urgent_, ahead_;
  std::mutex mutex_, joining_;
  std::condition_variable work_or_stop_, ended_;
  bool closed_ = false;
  LoaderTotals totals_;
  std::vector<std::thread> threads_;
};

}  // namespace sgl_batch
