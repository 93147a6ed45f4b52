// SPDX-License-Identifier: Apache-2.0
// Copies of a snapshot's slices in the memory of the next node.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/streams.hpp"
#include "fsdp/detail/checkpoint/snapshot_nodes.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// [Note: Pairs of nodes]
/// Nodes mirror each other in pairs, in the order of their lowest ranks; of an odd number, the last three go round in a
/// ring. Ranks with the same place in their nodes form a group, and all-gather their slices there: each slice crosses
/// once. If nodes have different numbers of ranks, the places are counted modulo the smallest number.

/// Ranks that keep each other's slices.
struct MirrorGroup {
  std::vector<int> ranks;    ///< ascending; one: there is no other node
  std::vector<int> keepers;  ///< by member: the member on the next node that keeps its slices

  /// @param rank  of the world
  MirrorGroup(Nodes const& nodes, int rank) {
    if (nodes.count() < 2) {
      ranks = {rank};
      keepers = {0};
      return;
    }
    int const pairs = nodes.count() / 2, pair = std::min(nodes.of(rank) / 2, pairs - 1);
    int const first = 2 * pair, last = pair == pairs - 1 ? nodes.count() : first + 2;
    std::vector<std::vector<int>> by_node;
    std::size_t places = SIZE_MAX;
    for (int node = first; node < last; ++node) {
      by_node.push_back(nodes.ranks(node));
      places = std::min(places, by_node.back().size());
    }
    auto const& mine = by_node[static_cast<std::size_t>(nodes.of(rank) - first)];
    auto const place = static_cast<std::size_t>(std::find(mine.begin(), mine.end(), rank) - mine.begin()) % places;
    for (auto& all : by_node) {
      std::vector<int> some;
      for (std::size_t i = place; i < all.size(); i += places) some.push_back(all[i]);
      ranks.insert(ranks.end(), some.begin(), some.end());
      all = std::move(some);
    }
    std::sort(ranks.begin(), ranks.end());
    keepers.resize(ranks.size());
    for (std::size_t node = 0; node < by_node.size(); ++node) {
      auto const& next = by_node[(node + 1) % by_node.size()];
      for (std::size_t i = 0; i < by_node[node].size(); ++i)
        keepers[index(by_node[node][i])] = static_cast<int>(index(next[i % next.size()]));
    }
  }

  std::size_t index(int rank) const {
    return static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
};

/// Slices of another rank that this rank keeps.
struct KeptBytes {
  std::size_t member = 0;   ///< of the group
  std::byte* to = nullptr;  ///< host memory; whole words
  std::int64_t bytes = 0;
};

/// Copies slices between nodes on a stream of its own.
template <Communicator C>
class SnapshotMirror {
 public:
  using Device = typename C::Device;

  /// @note Collective: yes, over the world.
  SnapshotMirror(C& world, MemoryAccount& account, Nodes const& nodes)
      : group_(nodes, world.rank()),
        me_(group_.index(world.rank())),
        comm_(world.split(group_.ranks.front(), world.rank(), "snapshots")),
        account_(&account),
        stream_(comm_.device().make_stream("snapshots", StreamPriority::normal)),
        done_(comm_.device().make_event()) {}
  SnapshotMirror(SnapshotMirror const&) = delete;
  SnapshotMirror& operator=(SnapshotMirror const&) = delete;

  MirrorGroup const& group() const { return group_; }
  /// Members whose slices this rank keeps.
  std::vector<std::size_t> kept() const {
    std::vector<std::size_t> members;
    for (std::size_t member = 0; member < group_.ranks.size(); ++member)
      if (group_.keepers[member] == static_cast<int>(me_) && member != me_) members.push_back(member);
    return members;
  }
  /// The rank that keeps this rank's slices; of the world.
  int keeper() const { return group_.ranks[static_cast<std::size_t>(group_.keepers[me_])]; }

  /// A text of every member. @note Collective: yes, over the group; blocks.
  std::vector<std::string> exchange(std::string text) { return comm_.exchange(std::move(text), "a snapshot's slices"); }

  /// Enqueues the transfer of all members' slices.
  /// @param own    host memory, whole words
  /// @param most   the largest number of bytes of a member
  /// @note Stream: its own; returns when everything is enqueued.
  /// @note Collective: yes, over the group.
  void start(std::byte const* own, std::int64_t bytes, std::int64_t most, std::vector<KeptBytes> const& kept) {
    auto const& device = comm_.device();
    auto const members = static_cast<std::int64_t>(group_.ranks.size());
    if (!buffer_) {
      chunk_ = std::min(chunk_bytes, (most + word - 1) / word * word);
      buffer_ = AccountedMemory<C>(comm_, *account_, MemoryTag::snapshot, static_cast<std::size_t>(members * chunk_));
    }
    for (std::int64_t begin = 0; begin < most; begin += chunk_) {
      auto const count = std::min(chunk_, (most - begin + word - 1) / word * word);
      auto* const mine = buffer_.data() + static_cast<std::int64_t>(me_) * count;
      if (last_.sequence != 0) comm_.wait_for_peers(stream_, last_, WaitSite::gather_peers_read);
      if (auto const here = std::min(count, bytes - begin); here > 0)
        device.copy_async(stream_, mine, own + begin, static_cast<std::size_t>(here));
      last_ = comm_.all_gather(stream_, reinterpret_cast<float const*>(mine), reinterpret_cast<float*>(buffer_.data()),
                               static_cast<std::size_t>(count / word), Label{"snapshot", "mirror"});
      for (auto const& other : kept)
        if (auto const here = std::min(count, other.bytes - begin); here > 0)
          device.copy_async(stream_, other.to + begin, buffer_.data() + static_cast<std::int64_t>(other.member) * count,
                            static_cast<std::size_t>(here));
    }
    device.record(done_, stream_);
  }
  /// Waits until all slices have arrived in host memory. For one thread, which may be any. @throws what has failed the
  /// stream
  void wait() { comm_.device().synchronize(std::as_const(done_)); }

 private:
  static constexpr std::int64_t word = sizeof(float);
  static constexpr std::int64_t chunk_bytes = std::int64_t{1} << 22;

  MirrorGroup group_;
  std::size_t me_;
  C comm_;
  MemoryAccount* account_;
  AccountedMemory<C> buffer_;  // of the group's communicator
  std::int64_t chunk_ = 0;
  Ticket last_{};
  typename Device::Stream stream_;
  typename Device::Event done_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
