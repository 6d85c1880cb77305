// Owns the threads that load experts: see expert_loader.h.
#include "expert_loader.h"

#include <algorithm>
#include <stdexcept>

#include "../cpu/packing.h"
#include "../cpu/tasks.h"
#include "../worker_threads.h"
#include "columns.h"

namespace sgl_batch {
namespace {

// Of one read, in whole panels or pairs of inputs: small enough for several threads to overlap, and for one huge page.
constexpr int64_t kReadBytes = (2 << 20) - ReadBuffer::kAround;

// The scales of a matrix [n, k] that begin at one of them.
BlockScales block_scales(const StoredScales& stored, int64_t first, int64_t n, int64_t k) {
  const int64_t rows = stored.rows == 0 ? n : stored.rows, columns = stored.columns == 0 ? k : stored.columns;
  return {stored.data + first, rows, columns, divide_up(k, columns)};
}

bool in_use(SlotLoad state) { return state == SlotLoad::kQueued || state == SlotLoad::kLoading; }

}  // namespace

ExpertLoader::ExpertLoader(const std::vector<std::string>& files, bool direct, bool keeps_cached, ExpertSlots slots, int num_threads)
    : slots_(slots), table_(static_cast<size_t>(slots.count)) {
  for (const std::string& name : files) files_.push_back(std::make_unique<WeightFile>(name, direct, keeps_cached));
  const bool stages = slots.transposed && slots.dtype != slots.stored;
  const size_t staged_bytes = stages ? static_cast<size_t>(2 * slots.inter * slots.hidden) * size_of(slots.stored) : 0;
  try {
    for (int index = 0; index < num_threads; ++index) {
      // Taken now, so that the memory that is free later is known.
      threads_.emplace_back([this, staged = std::vector<char>(staged_bytes)]() mutable { work(std::move(staged)); });
      pthread_setname_np(threads_.back().native_handle(), ("sgl-weights-" + std::to_string(index)).c_str());
    }
  } catch (...) {
    close();
    throw;
  }
}

ExpertLoader::~ExpertLoader() { close(); }

bool ExpertLoader::direct() const {
  return std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file->direct(); });
}

void ExpertLoader::check(const std::vector<int64_t>& slots) const {
  for (const int64_t slot : slots)
    if (slot < 0 || slot >= slots_.count)
      throw std::invalid_argument("slot " + std::to_string(slot) + " of " + std::to_string(slots_.count));
}

void ExpertLoader::submit(const std::vector<int64_t>& slots, const std::vector<ExpertPlaces>& places, bool urgent) {
  check(slots);
  if (slots.size() != places.size())
    throw std::invalid_argument(std::to_string(slots.size()) + " slots and " + std::to_string(places.size()) + " experts");
  for (const ExpertPlaces& expert : places)
    for (const MatrixPlace& matrix : expert)
      for (const FilePlace& place : {matrix.numbers, matrix.scales, matrix.zeros})
        if (place.file < 0 || place.file >= static_cast<int64_t>(files_.size()) || place.offset < 0)
          throw std::invalid_argument("byte " + std::to_string(place.offset) + " of file " + std::to_string(place.file) + " of " +
                                      std::to_string(files_.size()));
  for (const ExpertPlaces& expert : places)
    if (!has_scales(expert))
      throw std::invalid_argument("scale " + std::to_string(expert[0].scale) + " of " + std::to_string(slots_.stored_scales.count));
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::invalid_argument("the loader is closed");
    for (size_t i = 0; i < slots.size(); ++i) {
      const bool twice = std::find(slots.begin(), slots.begin() + static_cast<int64_t>(i), slots[i]) != slots.begin() + static_cast<int64_t>(i);
      if (twice || in_use(table_[slots[i]].state))
        throw std::invalid_argument("slot " + std::to_string(slots[i]) + " waits for an expert already");
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      table_[slots[i]] = {SlotLoad::kQueued, places[i], {}, 0};
      (urgent ? urgent_ : ahead_).push_back(slots[i]);
    }
  }
  work_or_stop_.notify_all();
}

// Whether all scales of an expert's matrices are among those stored.
bool ExpertLoader::has_scales(const ExpertPlaces& places) const {
  if (byte_group(slots_.dtype) == 0) return true;
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t n = i == 2 ? slots_.hidden : slots_.inter, k = i == 2 ? slots_.inter : slots_.hidden;
    const BlockScales own = block_scales(slots_.stored_scales, 0, n, k);
    const int64_t count = divide_up(n, own.rows) * own.across;
    if (places[i].scale < 0 || count > slots_.stored_scales.count - places[i].scale) return false;
  }
  return true;
}

void ExpertLoader::hurry(const std::vector<int64_t>& slots) {
  check(slots);
  const std::lock_guard lock(mutex_);
  for (const int64_t slot : slots) {
    const auto found = std::find(ahead_.begin(), ahead_.end(), slot);
    if (found == ahead_.end()) continue;
    ahead_.erase(found);
    urgent_.push_back(slot);
  }
}

std::vector<uint8_t> ExpertLoader::drop(const std::vector<int64_t>& slots) {
  check(slots);
  std::vector<uint8_t> dropped(slots.size(), 0);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < slots.size(); ++i) {
    Slot& slot = table_[slots[i]];
    if (slot.state != SlotLoad::kQueued) continue;
    for (auto* queue : {&urgent_, &ahead_}) std::erase(*queue, slots[i]);
    slot.state = SlotLoad::kEmpty;
    dropped[i] = 1;
    ++totals_.dropped;
  }
  return dropped;
}

void ExpertLoader::wait(const std::vector<int64_t>& slots) {
  check(slots);
  std::unique_lock lock(mutex_);
  const int64_t begun = now_ns();
  for (const int64_t index : slots) {
    const Slot& slot = table_[index];
    ended_.wait(lock, [&] { return closed_ || !in_use(slot.state); });
    if (slot.state == SlotLoad::kFailed) throw ReadFault(slot.error_number, slot.error);
    if (slot.state != SlotLoad::kReady)
      throw std::invalid_argument("slot " + std::to_string(index) + (closed_ ? ": the loader is closed" : " is empty"));
  }
  totals_.wait_ns += now_ns() - begun;
}

LoaderTotals ExpertLoader::totals() {
  const std::lock_guard lock(mutex_);
  return totals_;
}

const char* ExpertLoader::read(const FilePlace& place, int64_t skipped, int64_t bytes, Thread& own) {
  const int64_t begun = now_ns();
  const char* plain = files_[place.file]->read(place.offset + skipped, bytes, own.buffer);
  own.totals.read_ns += now_ns() - begun;
  own.totals.bytes += bytes;
  return plain;
}

template <typename Pack>
void ExpertLoader::each_chunk(const FilePlace& place, int64_t rows, int64_t row_bytes, int64_t together, Thread& own, const Pack& pack) {
  const int64_t at_once = std::max<int64_t>(1, kReadBytes / row_bytes / together) * together;
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t count = std::min(at_once, rows - first);
    const char* plain = read(place, first * row_bytes, count * row_bytes, own);
    const int64_t there = now_ns();
    pack(plain, first, count);
    own.totals.pack_ns += now_ns() - there;
  }
}

void ExpertLoader::load_rows(const MatrixPlace& place, const Target& target, Thread& own) {
  each_chunk(place.numbers, target.n, slots_.stored_bytes(target.k), kPanel, own,
             [&](const char* plain, int64_t first, int64_t rows) { pack(plain, place, first, rows, target); });
}

// Packs rows from `first` on, which begin a panel.
void ExpertLoader::pack(const char* plain, const MatrixPlace& place, int64_t first, int64_t rows, const Target& target) const {
  char* packed = target.to + packed_bytes(slots_.dtype, first * target.k);
  if (byte_group(slots_.dtype) == 0) {
    float* scales = target.scales == nullptr ? nullptr : target.scales + first;
    pack_rows(plain, slots_.stored, rows, target.k, packed, slots_.dtype, scales);
    return;
  }
  const BlockScales scales = block_scales(slots_.stored_scales, place.scale, target.n, target.k);
  const int64_t group = byte_group(slots_.dtype);
  for (int64_t row = 0; row < rows; row += kPanel) {
    const char* own = plain + row * target.k;
    char* panel = packed + packed_bytes(slots_.dtype, row * target.k);
    if (int8_group(slots_.dtype) != 0)
      pack_int8_codes(reinterpret_cast<const int8_t*>(own), scales, first + row, target.k, group, panel);
    else if (!pack_fp8_codes(reinterpret_cast<const uint8_t*>(own), scales, first + row, target.k, group, panel))
      throw ReadFault(0, files_[place.numbers.file]->name() + ": a matrix at byte " + std::to_string(place.numbers.offset) +
                             " has codes that are no numbers; quantise the model again, or fetch the file anew");
  }
}

void ExpertLoader::load_integers(const MatrixPlace& place, const Target& target, Thread& own) {
  const FourBitNumbers& stored = slots_.four_bits;
  const int64_t n = target.n, k = target.k;
  const int64_t scale_bytes = stored.scale_bytes(n, k), zero_bytes = stored.zero_bytes(n, k);
  const char* scales = read(place.scales, 0, scale_bytes, own);
  own.scales.assign(scales, scales + scale_bytes);
  const char* zeros = zero_bytes == 0 ? nullptr : read(place.zeros, 0, zero_bytes, own);
  const int64_t read_all = now_ns();
  if (const char* wrong = put_words(stored, own.scales.data(), zeros, n, k, slots_.dtype, target.to); wrong != nullptr)
    throw ReadFault(0, files_[place.scales.file]->name() + ": a matrix whose scales are at byte " + std::to_string(place.scales.offset) +
                           " has " + wrong + "; fetch the file anew, or use --weights resident");
  own.totals.pack_ns += now_ns() - read_all;
  each_chunk(place.numbers, stored.rows(n, k), stored.row_bytes(n, k), stored.rows_together(), own,
             [&](const char* integers, int64_t first, int64_t rows) {
               put_integers(stored, integers, first, rows, n, k, slots_.dtype, target.to);
             });
}

// The targets have the same shape, and their rows alternate.
void ExpertLoader::load_mxfp4(const MatrixPlace& place, const Target* targets, int64_t count, Thread& own) {
  const int64_t n = targets[0].n, k = targets[0].k, row_bytes = k / 2, power_bytes = k / kFp4BlockK;
  const char* powers = read(place.scales, 0, count * n * power_bytes, own);
  own.scales.assign(powers, powers + count * n * power_bytes);
  const auto* const all_powers = reinterpret_cast<const uint8_t*>(own.scales.data());
  each_chunk(place.numbers, n, count * row_bytes, kPanel, own, [&](const char* plain, int64_t first, int64_t rows) {
    const auto* const numbers = reinterpret_cast<const uint8_t*>(plain);
    for (int64_t row = 0; row < rows; row += kPanel)
      for (int64_t i = 0; i < count; ++i) {
        const Rows own_numbers{numbers + (row * count + i) * row_bytes, count * row_bytes};
        const Rows own_powers{all_powers + ((first + row) * count + i) * power_bytes, count * power_bytes};
        if (!pack_mxfp4_rows(own_numbers, own_powers, k, targets[i].to + packed_bytes(slots_.dtype, (first + row) * k)))
          throw ReadFault(0, files_[place.numbers.file]->name() + ": a matrix at byte " + std::to_string(place.numbers.offset) +
                                 " has numbers that bfloat16 has not; fetch the file anew, or use --weights resident");
      }
  });
}

// The targets have the same shape, and their columns alternate.
void ExpertLoader::load_columns(const MatrixPlace& place, const Target* targets, int64_t count, Thread& own) {
  const int64_t n = targets[0].n, k = targets[0].k, stride = count * n;
  const auto item_bytes = static_cast<int64_t>(size_of(slots_.stored));
  const int64_t row_bytes = stride * item_bytes;
  const bool stage = slots_.dtype != slots_.stored;
  each_chunk(place.numbers, k, row_bytes, 2, own, [&](const char* plain, int64_t first, int64_t rows) {
    for (int64_t i = 0; i < count; ++i) {
      const Columns columns{stride, i, count, n, k};
      if (stage)
        transpose_columns(plain, slots_.stored, columns, first, rows, own.staged.data() + i * n * k * item_bytes);
      else
        pack_columns(plain, slots_.stored, columns, first, rows, targets[i].to);
    }
  });
  if (!stage) return;
  const int64_t there = now_ns();
  for (int64_t i = 0; i < count; ++i)
    pack_rows(own.staged.data() + i * n * k * item_bytes, slots_.stored, n, k, targets[i].to, slots_.dtype, targets[i].scales);
  own.totals.pack_ns += now_ns() - there;
}

void ExpertLoader::load(int64_t slot, const ExpertPlaces& places, Thread& own) {
  const int64_t hidden = slots_.hidden, inter = slots_.inter;
  const int64_t matrix = packed_bytes(slots_.dtype, hidden * inter);
  char* gate = slots_.w13 + 2 * slot * matrix;
  float* gate_scales = slots_.w13_scales == nullptr ? nullptr : slots_.w13_scales + 2 * slot * inter;
  float* down_scales = slots_.w2_scales == nullptr ? nullptr : slots_.w2_scales + slot * hidden;
  const Target targets[] = {{inter, hidden, gate, gate_scales},
                            {inter, hidden, gate + matrix, gate_scales == nullptr ? nullptr : gate_scales + inter},
                            {hidden, inter, slots_.w2 + slot * matrix, down_scales}};
  if (slots_.transposed) {
    load_columns(places[0], &targets[0], 2, own);
    load_columns(places[2], &targets[2], 1, own);
  } else if (slots_.dtype == DType::kFp4) {
    load_mxfp4(places[0], &targets[0], 2, own);
    load_mxfp4(places[2], &targets[2], 1, own);
  } else {
    for (size_t i = 0; i < places.size(); ++i)
      slots_.are_int4() ? load_integers(places[i], targets[i], own) : load_rows(places[i], targets[i], own);
  }
}

// Returns what went wrong, and nothing if the slot is filled.
std::string ExpertLoader::fill(int64_t slot, const ExpertPlaces& places, Thread& own, int& error_number) {
  own.totals = {};
  try {
    load(slot, places, own);
  } catch (const ReadFault& fault) {
    error_number = fault.number;
    return fault.what();
  } catch (const std::exception& fault) {
    return std::string("loading an expert: ") + fault.what();
  }
  return {};
}

void ExpertLoader::work(std::vector<char> staged) {
  block_signals();
  Thread own;
  own.staged = std::move(staged);
  std::unique_lock lock(mutex_);
  while (true) {
    work_or_stop_.wait(lock, [&] { return closed_ || !urgent_.empty() || !ahead_.empty(); });
    if (closed_) return;
    auto& queue = urgent_.empty() ? ahead_ : urgent_;
    const int64_t index = queue.front();
    queue.pop_front();
    Slot& slot = table_[index];
    slot.state = SlotLoad::kLoading;
    const ExpertPlaces places = slot.places;
    lock.unlock();
    int number = 0;
    const std::string error = fill(index, places, own, number);
    lock.lock();
    slot.state = error.empty() ? SlotLoad::kReady : SlotLoad::kFailed;
    slot.error = error;
    slot.error_number = number;
    totals_.bytes += own.totals.bytes;
    totals_.read_ns += own.totals.read_ns;
    totals_.pack_ns += own.totals.pack_ns;
    totals_.experts += error.empty();
    totals_.errors += !error.empty();
    ended_.notify_all();
  }
}

void ExpertLoader::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  work_or_stop_.notify_all();
  ended_.notify_all();
  const std::lock_guard joining(joining_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace sgl_batch
