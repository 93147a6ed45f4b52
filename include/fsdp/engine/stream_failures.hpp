// SPDX-License-Identifier: Apache-2.0
// Finds failed streams of an engine, and records whether a call has thrown their failures.
#pragma once

#include "fsdp/concepts.hpp"
#include "fsdp/engine/streams.hpp"
#include "fsdp/error.hpp"
#include "fsdp/failure.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Failures of the streams of one rank's engine. Used by its host thread.
template <Device D>
class StreamFailures {
 public:
  using Stream = typename D::Stream;

  explicit StreamFailures(Streams<D> const& streams) : streams_(&streams) {}

  template <class Visit>
  void for_each_stream(Visit const& visit) {
    streams_->for_each(visit);
  }
  /// The stream to report: one that has failed by itself, else one that peers have failed; nullptr: none.
  [[gnu::cold]] Stream* failed_stream() {
    Stream* found = nullptr;
    for_each_stream([&](Stream& stream) {
      auto const* const why = failure_of(stream);
      if (why != nullptr && (found == nullptr || why->kind != ErrorKind::peer)) found = &stream;
    });
    return found;
  }
  /// Checks the streams without waiting.
  /// @throws why one of them has failed: the cause, where there are failures that come of it
  void expect_whole() {
    if constexpr (TellsFailure<Stream>)
      if (auto const* const failed = failed_stream()) failed->rethrow();
  }

  /// Calls `act`, which waits for peers, or enqueues. Peers may have ended because a stream of this rank has failed,
  /// and this rank hears of them first.
  /// @throws why a stream has failed by itself, in place of a PeerError; else what `act` throws
  template <class Act>
  decltype(auto) with_cause(Act const& act) {
    try {
      return act();
    } catch (PeerError const&) {
      raise_cause();
      throw;
    }
  }
  /// Throws the cause of a PeerError that was caught: see with_cause.
  [[gnu::cold]] void raise_cause() {
    told_ = true;
    for_each_stream([](Stream const& stream) { raise_own_failure(stream); });
  }
  /// @return whether a call has thrown a stream's or a peer's failure
  bool was_told() {
    bool told = told_;
    if constexpr (TellsFailure<Stream>) for_each_stream([&](Stream const& stream) { told |= stream.was_told(); });
    return told;
  }

 private:
  Streams<D> const* streams_;
  bool told_ = false;  ///< a PeerError was on its way through with_cause
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
