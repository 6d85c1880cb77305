#include "exchange.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <numeric>
#include <stdexcept>
#include <string>

#include "rank_sums.h"
#include "tasks.h"

namespace sgl_batch {
namespace {

constexpr size_t kHeaderBytes = 8192;
constexpr int64_t kTaskBytes = 256 << 10;  // what one thread copies at a time
constexpr int64_t kLookNs = 20'000;        // looks without giving way
static_assert(sizeof(RegionHeader) <= kHeaderBytes);
static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex waits on the word itself");

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void publish(std::atomic<uint32_t>& word, uint32_t value) {
  word.store(value, std::memory_order_release);
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool reached(const std::atomic<uint32_t>& word, uint32_t value) {
  return static_cast<int32_t>(word.load(std::memory_order_acquire) - value) >= 0;
}

// False after the timeout. Sleeps a second at most, so that a wake that is missed costs no more than that.
bool await(std::atomic<uint32_t>& word, uint32_t value, const Wait& wait) {
  const int64_t begun = now_ns();
  for (int64_t spent = 0; spent < wait.spin_ns; spent = now_ns() - begun) {
    for (int look = 0; look < 64; ++look) {
      if (reached(word, value)) return true;
      pause();
    }
    if (spent > kLookNs) sched_yield();
  }
  while (!reached(word, value)) {
    if (now_ns() - begun > wait.timeout_ns) return false;
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - value) >= 0) return true;
    const int64_t nap = std::min<int64_t>(1'000'000'000, wait.timeout_ns);
    const timespec limit{nap / 1'000'000'000, nap % 1'000'000'000};
    futex(word, FUTEX_WAIT, seen, &limit);
  }
  return true;
}

// task(first, last) over [0, count) rows of `bytes` each, on as many threads as pay.
template <typename Task>
void over_rows(int64_t count, int64_t bytes, const Task& task) {
  const int64_t rows = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, bytes));
  run_tasks(divide_up(count, rows), [&](int64_t index, int) { task(index * rows, std::min(count, (index + 1) * rows)); });
}

bool has_any(const int32_t* ids, int64_t top_k, int64_t first, int64_t last) {
  return std::any_of(ids, ids + top_k, [=](int32_t id) { return id >= first && id < last; });
}

}  // namespace

RegionLayout::RegionLayout(size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t share = (bytes - kHeaderBytes) / 9 / kPage * kPage;
  x = kHeaderBytes;
  ids = x + 2 * share;
  weights = ids + share / 2;
  sums = ids + share;
  received = sums + 3 * share;
  received_ids = received + 2 * share;
  received_weights = received_ids + share / 2;
  end = received_ids + share;
}

Exchange::Exchange(std::vector<char*> regions, size_t region_bytes, int rank, Wait wait)
    : regions_(std::move(regions)),
      region_bytes_(region_bytes),
      layout_(region_bytes),
      rank_(rank),
      wait_(wait),
      tokens_phase_(header(rank).exchanged.load(std::memory_order_relaxed)) {}

void Exchange::await_all(std::atomic<uint32_t> RegionHeader::* word, uint32_t value) {
  const int64_t begun = now_ns();
  for (size_t peer = 0; peer < regions_.size(); ++peer) {
    if (static_cast<int>(peer) == rank_ || await(header(static_cast<int>(peer)).*word, value, wait_)) continue;
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(wait_.timeout_ns) * 1e-9);
    throw std::runtime_error("rank " + std::to_string(peer) + " of the group did not take part in an exchange in " +
                             seconds + " s");
  }
  waited_ns_ += now_ns() - begun;
}

void Exchange::publish_tokens(const TokenFormat& format, const char* x, size_t x_stride_bytes, const int32_t* ids,
                              const float* weights) {
  const int64_t choices = format.tokens * format.top_k, row_bytes = format.hidden * format.element_bytes;
  for (int64_t i = 0; i < choices; ++i)
    if (ids[i] < -1 || ids[i] >= format.experts)
      throw std::invalid_argument("topk_ids_TK holds " + std::to_string(ids[i]) + "; experts are 0 to " +
                                  std::to_string(format.experts - 1) + ", and -1 is none");
  const auto room = static_cast<int64_t>(std::min((layout_.ids - layout_.x) / std::max<int64_t>(1, row_bytes),
                                                  (layout_.weights - layout_.ids) / (4 * format.top_k)));
  if (format.tokens > room)
    throw std::invalid_argument(std::to_string(format.tokens) + " tokens in one exchange; the shared memory of a rank holds " +
                                std::to_string(room) + ": lower b_moe");
  char* own = regions_[rank_];
  ++tokens_phase_;
  header(rank_).formats[tokens_phase_ % 2] = format;
  over_rows(format.tokens, row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      std::memcpy(own + layout_.x + t * row_bytes, x + t * x_stride_bytes, static_cast<size_t>(row_bytes));
  });
  // Not memcpy: without tokens there may be no memory, and memcpy must not be given a null pointer even for no bytes.
  std::copy_n(ids, choices, reinterpret_cast<int32_t*>(own + layout_.ids));
  std::copy_n(weights, choices, reinterpret_cast<float*>(own + layout_.weights));
  publish(header(rank_).exchanged, tokens_phase_);
  await_all(&RegionHeader::exchanged, tokens_phase_);
  check_formats();
}

void Exchange::check_formats() const {
  const auto described = [](const TokenFormat& f) {
    return std::to_string(f.hidden) + " numbers of type " + std::to_string(f.dtype) + " with " + std::to_string(f.top_k) +
           " of " + std::to_string(f.experts) + " experts";
  };
  const TokenFormat& own = format(rank_);
  for (int peer = 0; peer < static_cast<int>(regions_.size()); ++peer) {
    const TokenFormat& theirs = format(peer);
    if (theirs.top_k == own.top_k && theirs.experts == own.experts && theirs.hidden == own.hidden &&
        theirs.dtype == own.dtype)
      continue;
    throw std::invalid_argument("rank " + std::to_string(peer) + " sends rows of " + described(theirs) + ", and rank " +
                                std::to_string(rank_) + " of " + described(own) + "; all ranks must give the same");
  }
}

int64_t Exchange::choose_rows() {
  const int ranks = static_cast<int>(regions_.size());
  rows_.clear();
  for (int source = 0; source < ranks; ++source) {
    const TokenFormat& f = format(source);
    const int64_t local = f.experts / ranks, first = rank_ * local;
    const auto* ids = reinterpret_cast<const int32_t*>(regions_[source] + layout_.ids);
    header(rank_).starts[source] = static_cast<int64_t>(rows_.size());
    for (int64_t t = 0; t < f.tokens; ++t)
      if (has_any(ids + t * f.top_k, f.top_k, first, first + local)) rows_.push_back({source, static_cast<int32_t>(t)});
  }
  const auto count = static_cast<int64_t>(rows_.size());
  const int64_t row_bytes = format(rank_).hidden * 4, choice_bytes = format(rank_).top_k * 4;
  if (static_cast<size_t>(count * row_bytes) > std::min(layout_.received - layout_.sums, layout_.received_ids - layout_.received) ||
      static_cast<size_t>(count * choice_bytes) > layout_.received_weights - layout_.received_ids)
    throw std::runtime_error(std::to_string(count) + " rows came to this rank, more than its shared memory holds: lower b_moe");
  return count;
}

Exchange::Received Exchange::received() const {
  char* const own = regions_[rank_];
  return {own + layout_.received, reinterpret_cast<int32_t*>(own + layout_.received_ids),
          reinterpret_cast<float*>(own + layout_.received_weights), reinterpret_cast<float*>(own + layout_.sums)};
}

void Exchange::take_rows() {
  const TokenFormat& f = format(rank_);
  const int64_t local = f.experts / static_cast<int64_t>(regions_.size()), first = rank_ * local;
  const int64_t row_bytes = f.hidden * f.element_bytes;
  const Received to = received();
  over_rows(static_cast<int64_t>(rows_.size()), row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Row row = rows_[i];
      const char* region = regions_[row.rank];
      std::memcpy(to.x + i * row_bytes, region + layout_.x + row.token * row_bytes, static_cast<size_t>(row_bytes));
      const auto* theirs = reinterpret_cast<const int32_t*>(region + layout_.ids) + row.token * f.top_k;
      const auto* factors = reinterpret_cast<const float*>(region + layout_.weights) + row.token * f.top_k;
      for (int64_t k = 0; k < f.top_k; ++k) {
        const bool mine = theirs[k] >= first && theirs[k] < first + local;
        to.ids[i * f.top_k + k] = mine ? static_cast<int32_t>(theirs[k] - first) : -1;
        to.weights[i * f.top_k + k] = mine ? factors[k] : 0.0F;
      }
    }
  });
}

void Exchange::publish_sums(const float* sums, int64_t count) {
  const int64_t row_bytes = format(rank_).hidden * 4;
  char* const own = regions_[rank_] + layout_.sums;
  const char* from = reinterpret_cast<const char*>(sums);
  over_rows(from == own ? 0 : count, row_bytes, [&](int64_t first, int64_t last) {
    std::memcpy(own + first * row_bytes, from + first * row_bytes, static_cast<size_t>((last - first) * row_bytes));
  });
  publish(header(rank_).exchanged, tokens_phase_ + 1);
  await_all(&RegionHeader::exchanged, tokens_phase_ + 1);
}

// For each of this rank's tokens and each rank the row of its sums, or -1; [T, ranks].
void Exchange::place_sums(std::vector<int64_t>& places) const {
  const TokenFormat& f = format(rank_);
  const int ranks = static_cast<int>(regions_.size());
  const int64_t local = f.experts / ranks;
  const auto* ids = reinterpret_cast<const int32_t*>(regions_[rank_] + layout_.ids);
  int64_t next[kMostRanks];
  for (int peer = 0; peer < ranks; ++peer) next[peer] = header(peer).starts[rank_];
  places.assign(static_cast<size_t>(f.tokens * ranks), -1);
  for (int64_t t = 0; t < f.tokens; ++t)
    for (int peer = 0; peer < ranks; ++peer)
      if (has_any(ids + t * f.top_k, f.top_k, peer * local, (peer + 1) * local)) places[t * ranks + peer] = next[peer]++;
}

void Exchange::combine(float* out) {
  const TokenFormat& f = format(rank_);
  const int ranks = static_cast<int>(regions_.size());
  std::vector<int64_t> places;
  place_sums(places);
  over_rows(f.tokens, f.hidden * 4, [&](int64_t first, int64_t last) {
    std::vector<float> space(static_cast<size_t>(f.hidden) * ranks);
    for (int64_t t = first; t < last; ++t) {
      const auto row_of = [&](int peer) -> const float* {
        const int64_t place = places[t * ranks + peer];
        return place < 0 ? nullptr : reinterpret_cast<const float*>(regions_[peer] + layout_.sums) + place * f.hidden;
      };
      write_sum_of_ranks(row_of, ranks, f.hidden, space.data(), out + t * f.hidden);
    }
  });
}

void Exchange::gather(const int64_t* own, int count, int64_t* all) {
  const uint32_t number = header(rank_).posted.load(std::memory_order_relaxed) + 1;
  std::copy(own, own + count, header(rank_).boards[number % 2]);
  publish(header(rank_).posted, number);
  await_all(&RegionHeader::posted, number);
  for (size_t peer = 0; peer < regions_.size(); ++peer)
    std::copy_n(header(static_cast<int>(peer)).boards[number % 2], count, all + peer * count);
}

// Publishes a board and waits for everybody's, which must say the same.
void Exchange::agree_on(const std::vector<int64_t>& described) {
  const auto count = std::min<size_t>(described.size(), kMostBoardValues);
  std::vector<int64_t> all(regions_.size() * count);
  gather(described.data(), static_cast<int>(count), all.data());
  const auto listed = [count](const int64_t* values) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
    return text;
  };
  for (size_t peer = 0; peer < regions_.size(); ++peer) {
    const int64_t* theirs = all.data() + peer * count;
    if (std::equal(theirs, theirs + count, described.data())) continue;
    throw std::invalid_argument("rank " + std::to_string(peer) + " gathers columns of (rows left, bytes of each rank's row) " +
                                listed(theirs) + ", and rank " + std::to_string(rank_) + " of " + listed(described.data()) +
                                "; all ranks must give the same");
  }
}

void Exchange::gather_columns(const char* own, size_t own_stride_bytes, int64_t rows, const std::vector<int64_t>& widths,
                              char* out) {
  // Two slots in turns: a rank that begins a round has waited for all ranks in the round before, so that every rank has
  // read by then what it overwrites.
  const size_t slot_bytes = (region_bytes_ - kHeaderBytes) / 2 / 64 * 64;
  const int64_t widest = std::max<int64_t>(1, *std::max_element(widths.begin(), widths.end()));
  const int64_t out_bytes = std::accumulate(widths.begin(), widths.end(), int64_t{0}), own_bytes = widths[rank_];
  const auto at_once = static_cast<int64_t>(slot_bytes) / widest;
  if (at_once == 0)
    throw std::runtime_error("a row of " + std::to_string(widest) + " bytes does not fit a slot of " +
                             std::to_string(slot_bytes));
  std::vector<int64_t> described{0};
  described.insert(described.end(), widths.begin(), widths.end());
  for (int64_t begin = 0; begin < rows; begin += at_once) {
    const int64_t count = std::min(at_once, rows - begin);
    const uint32_t round = header(rank_).posted.load(std::memory_order_relaxed) + 1;
    const auto slot = [&](size_t rank) { return regions_[rank] + kHeaderBytes + round % 2 * slot_bytes; };
    // A rank without columns may have no memory for them, and memcpy must not be given a null pointer even for no bytes.
    if (own_bytes > 0)
      over_rows(count, own_bytes, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
          std::memcpy(slot(rank_) + row * own_bytes, own + (begin + row) * own_stride_bytes, static_cast<size_t>(own_bytes));
      });
    described[0] = rows - begin;
    agree_on(described);
    over_rows(count, out_bytes, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        char* to = out + (begin + row) * out_bytes;
        for (size_t rank = 0; rank < regions_.size(); to += widths[rank++])
          std::memcpy(to, slot(rank) + row * widths[rank], static_cast<size_t>(widths[rank]));
      }
    });
  }
}

}  // namespace sgl_batch
