// SPDX-License-Identifier: Apache-2.0
// The streams of an engine.
#pragma once

#include <array>
#include <optional>

#include "fsdp/concepts.hpp"
#include "fsdp/stream_kind.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Compute may be the caller's stream; the others are the engine's own.
template <Device D>
class Streams {
 public:
  using Stream = typename D::Stream;

  /// @param compute  nullptr: a stream of its own
  [[gnu::cold]] Streams(D const& device, Stream* compute) {
    if (compute == nullptr) compute = &owned_[0].emplace(device.make_stream("compute", StreamPriority::normal));
    streams_[0] = compute;
    add(device, StreamKind::gather);
    add(device, StreamKind::reduce);
  }
  Streams(Streams&&) = delete;

  /// Adds the stream that replicas need.
  [[gnu::cold]] void add_replicate(D const& device) {
    if (streams_[index(StreamKind::replicate)] == nullptr) add(device, StreamKind::replicate);
  }
  /// Adds the copy stream, for offloading.
  [[gnu::cold]] void add_copy(D const& device) {
    if (streams_[index(StreamKind::copy)] == nullptr) add(device, StreamKind::copy);
  }
  /// The stream of a kind; nullptr: there is none.
  Stream* find(StreamKind kind) const { return streams_[index(kind)]; }
  /// @pre the stream exists
  Stream& operator[](StreamKind kind) const { return *streams_[index(kind)]; }
  /// Calls `visit(Stream&)` for each stream.
  template <class Visit>
  void for_each(Visit const& visit) const {
    for (auto const kind :
         {StreamKind::gather, StreamKind::compute, StreamKind::reduce, StreamKind::replicate, StreamKind::copy})
      if (auto* const stream = streams_[index(kind)]; stream != nullptr) visit(*stream);
  }

 private:
  static constexpr std::size_t index(StreamKind kind) { return static_cast<std::size_t>(kind); }
  void add(D const& device, StreamKind kind) {
    streams_[index(kind)] = &owned_[index(kind)].emplace(device.make_stream(name(kind), StreamPriority::high));
  }

  std::array<std::optional<Stream>, stream_kinds> owned_;
  std::array<Stream*, stream_kinds> streams_{};
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
