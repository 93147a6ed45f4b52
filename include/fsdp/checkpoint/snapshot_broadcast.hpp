// SPDX-License-Identifier: Apache-2.0
// Texts and files from one rank to all.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "fsdp/concepts.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Broadcasts bytes over a communicator of its own. @tparam C  Communicator
template <Communicator C>
class SnapshotBroadcast {
 public:
  /// @note Collective: yes, all of it.
  explicit SnapshotBroadcast(C& world)
      : comm_(world.split(0, world.rank(), "snapshot slices")),
        memory_(static_cast<float*>(comm_.allocate(chunk_words * sizeof(float)))),
        stream_(comm_.device().make_stream("snapshot slices", StreamPriority::normal)) {}
  SnapshotBroadcast(SnapshotBroadcast const&) = delete;
  SnapshotBroadcast& operator=(SnapshotBroadcast const&) = delete;
  ~SnapshotBroadcast() { comm_.deallocate(memory_, chunk_words * sizeof(float)); }

  /// `bytes` of rank `root` to all; the same number on all ranks.
  void bytes(std::span<std::byte> bytes, int root) {
    for (std::size_t begin = 0; begin < bytes.size(); begin += chunk_words * sizeof(float)) {
      auto const part = bytes.subspan(begin, std::min(bytes.size() - begin, chunk_words * sizeof(float)));
      auto const& device = comm_.device();
      if (last_.sequence != 0) comm_.wait_for_peers(stream_, last_, WaitSite::gather_peers_read);
      if (comm_.rank() == root) device.copy_async(stream_, memory_, part.data(), part.size());
      last_ = comm_.broadcast(stream_, memory_, (part.size() + sizeof(float) - 1) / sizeof(float), root,
                              Label{"snapshot", "load"});
      if (comm_.rank() != root) device.copy_async(stream_, part.data(), memory_, part.size());
      device.synchronize(stream_);
    }
  }
  /// The text of rank `root` to all, of any length.
  void text(std::string& text, int root) {
    std::uint64_t size = text.size();
    bytes(std::as_writable_bytes(std::span(&size, 1)), root);
    text.resize(size);
    bytes(std::as_writable_bytes(std::span(text)), root);
  }

 private:
  static constexpr std::size_t chunk_words = std::size_t{1} << 20;

  C comm_;
  float* memory_;
  Ticket last_{};
  typename C::Device::Stream stream_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
