// SPDX-License-Identifier: Apache-2.0
// Traces: begin and end of the work on each stream. The streams write the time stamps; a disabled trace costs a branch
// per span.
#pragma once

#include <time.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/base/streams.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A span of work on one stream.
///
/// [Note: What a span covers] It begins when the work begins to run, after the stream's waits for events of its own
/// rank: what a stream waits is a gap before the span, no part of it. A collective waits for its peers inside, and that
/// is part of its span, as it is of every collective's time. Spans of gathers include the cast, those of reductions the
/// accumulation into the gradient shard. Zeroing a slot is in no span.
struct TraceSpan {
  std::string unit;
  /// "all-gather", "forward", "recompute", "backward", "reduce-scatter", "all-reduce", "optimizer", "norm", ...
  std::string what;
  std::string pass;  ///< "forward", "backward", "optimizer"
  StreamKind kind{};
  std::int64_t bytes = 0;     ///< of a collective: its full buffer; of an update: the shard; else 0
  std::int64_t step = 0;      ///< optimizer steps complete when it was enqueued
  std::int64_t begin_ns = 0;  ///< the host's monotonic clock; CUDA: the device's global timer, shifted to it
  std::int64_t end_ns = 0;

  /// Moves data between ranks. The all-reduce of a gradient norm does so on the compute stream.
  bool communicates() const { return what == "all-gather" || what == "reduce-scatter" || what == "all-reduce"; }
  /// Whether the span computes. A span that neither communicates nor computes is local work of a communication stream:
  /// a cast, or an accumulation without a collective.
  bool computes() const { return kind == StreamKind::compute && !communicates(); }
};

namespace detail {

/// The host's monotonic clock. (The clock of std::chrono::steady_clock, whose header would take longer to compile than
/// this one.)
inline std::int64_t steady_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// A kernel that writes the time at which the stream reaches it.
struct Stamp {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, std::int64_t* out) const {
    if (block.thread() != 0) return;
#if defined(__CUDA_ARCH__)
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *out = static_cast<std::int64_t>(now);
#else
    *out = steady_ns();
#endif
  }
};

/// The offset to add to another clock, from observations that bound it on either side.
class ClockOffset {
 public:
  void at_least(std::int64_t ns) { low_ = std::max(low_, ns); }
  void at_most(std::int64_t ns) { high_ = std::min(high_, ns); }
  /// The offset: 0 if the bounds allow it, because then the clocks may be the same one; else their middle.
  std::int64_t value() const { return low_ <= 0 && high_ >= 0 ? 0 : low_ + (high_ - low_) / 2; }

 private:
  std::int64_t low_ = std::numeric_limits<std::int64_t>::min() / 4;
  std::int64_t high_ = std::numeric_limits<std::int64_t>::max() / 4;
};

/// Stands for a range on a profiler's timeline (cuda::NvtxRange) on devices without one.
struct NoRange {
  NoRange() = default;
  NoRange(std::string_view, std::string_view, std::string_view) {}
  void end() {}
};
template <class D>
struct RangeOf {
  using type = NoRange;
};
template <class D>
requires requires { typename D::Range; }
struct RangeOf<D> {
  using type = typename D::Range;
};

}  // namespace detail

/// Collects spans of one rank: two stamps a span, in device memory taken once. Spans beyond the capacity are counted,
/// not kept.
template <Device D>
class Tracer {
 public:
  using Stream = typename D::Stream;
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  /// @param capacity    spans
  /// @param first_step  the number that the first step gets
  /// @param first_span  the number that begin() returns first: above those of earlier tracers of the same engine
  Tracer(D const& device, MemoryAccount& account, std::size_t capacity, std::int64_t first_step = 0,
         std::size_t first_span = 0)
      : device_(device),
        stamps_(device_, account, MemoryTag::scalars, std::max<std::size_t>(capacity, 1) * 2 * sizeof(std::int64_t)),
        step_(first_step),
        records_(capacity),
        first_(first_span) {}
  Tracer(Tracer&&) = delete;

  /// The texts must outlive the tracer: unit names and literals. @return what end() takes
  [[gnu::noinline]] std::size_t begin(Stream& stream, StreamKind kind, std::string_view unit, std::string_view what,
                                      std::string_view pass, std::int64_t bytes) {
    bool const updates = pass == "optimizer";
    if (updated_ && !updates) ++step_;
    updated_ = updates;
    if (size_ == records_.size()) {
      ++lost_;
      return none;
    }
    auto const span = size_++;
    records_[span] = {unit, what, pass, kind, false, bytes, step_};
    device_.launch(stream, std::int64_t{1}, detail::Stamp{}, stamp(span));
    return first_ + span;
  }
  /// @param span  of begin(), of this tracer or an earlier one: those that it does not hold are ignored
  [[gnu::noinline]] void end(Stream& stream, std::size_t span) {
    if (span < first_ || span - first_ >= size_) return;
    device_.launch(stream, std::int64_t{1}, detail::Stamp{}, stamp(span - first_) + 1);
    records_[span - first_].ended = true;
  }
  /// The number of the next span.
  std::size_t next_span() const { return first_ + size_; }

  std::size_t lost() const { return lost_; }

  /// The spans so far, in the order in which the host enqueued them; starts anew. A span that has not ended is left
  /// out, here and in the next collection: an exception has cut it short, or it is still open.
  /// @pre all streams that carry spans have been synchronised
  [[gnu::cold]] std::vector<TraceSpan> collect(Stream& stream) {
    std::vector<std::int64_t> times(size_ * 2);
    device_.copy_async(stream, times.data(), stamps_.data(), times.size() * sizeof(std::int64_t));
    device_.synchronize(stream);
    auto const offset = offset_to_host(stream);
    std::vector<TraceSpan> spans;
    spans.reserve(size_);
    for (std::size_t i = 0; i < size_; ++i) {
      auto const& r = records_[i];
      if (r.ended)
        spans.push_back({std::string(r.unit), std::string(r.what), std::string(r.pass), r.kind, r.bytes, r.step,
                         times[2 * i] + offset, times[2 * i + 1] + offset});
    }
    first_ += std::exchange(size_, 0);
    lost_ = 0;
    return spans;
  }

 private:
  struct Record {
    std::string_view unit, what, pass;
    StreamKind kind;
    bool ended;
    std::int64_t bytes, step;
  };

  std::int64_t* stamp(std::size_t span) { return stamps_.template as<std::int64_t>() + 2 * span; }

  /// The offset of the host's clock to the stamps': a stamp is taken between two readings of the host's clock.
  std::int64_t offset_to_host(Stream& stream) {
    detail::ClockOffset offset;
    for (int round = 0; round < 4; ++round) {
      std::int64_t stamped = 0;
      auto const before = detail::steady_ns();
      device_.launch(stream, std::int64_t{1}, detail::Stamp{}, stamp(0));
      device_.copy_async(stream, &stamped, stamp(0), sizeof stamped);
      device_.synchronize(stream);
      offset.at_least(before - stamped);
      offset.at_most(detail::steady_ns() - stamped);
    }
    return offset.value();
  }

  D device_;
  AccountedMemory<D> stamps_;
  std::size_t lost_ = 0;
  std::int64_t step_;
  bool updated_ = false;                ///< the last span belongs to an optimizer step
  detail::FixedArray<Record> records_;  ///< one for each span of the capacity
  std::size_t first_ = 0;               ///< number of the span in the first record
  std::size_t size_ = 0;                ///< number of records in use
};

/// Records spans if a tracer is attached. Without a tracer begin() and Scope::end() are a branch each. On a device that
/// has ranges of its own (CUDA: NVTX), every scope is one as well, on the calling thread's timeline, with or without a
/// tracer.
template <Device D>
class TraceHook {
 public:
  using Stream = typename D::Stream;

  /// A span in progress. One that is dropped without end() is left out of the trace, and so is one that is open when
  /// the trace is collected or stopped. The hook must outlive it.
  class Scope {
   public:
    Scope() = default;
    /// Ends the span: later work of `stream` is not part of it.
    void end() {
      range_.end();
      if (hook_ == nullptr) return;
      if (auto* const tracer = std::exchange(hook_, nullptr)->tracer_) tracer->end(*stream_, span_);
    }

   private:
    friend TraceHook;
    using Range = typename detail::RangeOf<D>::type;
    explicit Scope(Range range) : range_(std::move(range)) {}
    TraceHook const* hook_ = nullptr;  ///< nullptr: nothing is recorded
    Stream* stream_ = nullptr;
    std::size_t span_ = 0;
    [[no_unique_address]] Range range_;
  };

  /// @param tracer  nullptr: record nothing
  void attach(Tracer<D>* tracer) {
    next_span_ = next_span();
    tracer_ = tracer;
  }
  Tracer<D>* tracer() const { return tracer_; }
  /// The first number that no span has, of any tracer so far.
  std::size_t next_span() const { return tracer_ == nullptr ? next_span_ : tracer_->next_span(); }

  /// Begins a span: the work of `stream` until Scope::end(). Call it after the waits of the work, see [Note: What a
  /// span covers].
  [[nodiscard]] Scope begin(Stream& stream, StreamKind kind, std::string_view unit, std::string_view what,
                            std::string_view pass, std::int64_t bytes = 0) const {
    Scope scope(typename Scope::Range(unit, pass, what == pass ? std::string_view{} : what));
    if (tracer_ != nullptr) {
      scope.span_ = tracer_->begin(stream, kind, unit, what, pass, bytes);
      scope.stream_ = &stream;
      scope.hook_ = this;
    }
    return scope;
  }

 private:
  Tracer<D>* tracer_ = nullptr;
  std::size_t next_span_ = 0;  ///< after the last tracer
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
