// SPDX-License-Identifier: Apache-2.0
// Kinds of streams of an engine, and kinds of waits. An engine derives its waits from accesses to buffers; the kind
// names the waiting stream and the reason. Devices and communicators are given it: they measure blocked time by
// kind, and tests drop the waits of one kind.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// `copy` moves optimizer state between host and device. It is there if something is offloaded.
enum class StreamKind : unsigned char { compute, gather, reduce, replicate, copy, count_ };
inline constexpr auto stream_kinds = static_cast<std::size_t>(StreamKind::count_);

inline constexpr std::array<std::string_view, stream_kinds> stream_names{"compute", "gather", "reduce", "replicate",
                                                                         "copy"};
constexpr std::string_view name(StreamKind kind) { return stream_names[static_cast<std::size_t>(kind)]; }

/// `none` is for waits of user code.
enum class WaitSite : unsigned char {
  none,
  compute_unsharded,        ///< compute waits until a unit's parameters are gathered
  compute_gradient_slot,    ///< compute waits until its gradient slot is free
  gather_slot_read,         ///< gather waits until compute has read the slot's last content
  gather_peers_read,        ///< gather waits until peers have copied the slot's last content
  gather_updated,           ///< gather waits until the optimizer has written the unit's shard
  gather_kept_slice,        ///< gather waits until compute has copied the slice that stays after forward
  reduce_gradients,         ///< reduce waits until backward has written the unit's gradients
  reduce_peers_read,        ///< reduce (or compute, which opens it) waits until peers have summed the slot
  reduce_partial_read,      ///< reduce waits until replicate and peers have read a unit's partial gradient shard
  reduce_wire_read,         ///< reduce waits until replicate and peers have read a wire buffer's last content
  replicate_scattered,      ///< replicate waits until the slice to be all-reduced is there
  replicate_peers_read,     ///< replicate waits until peers of the other groups have read the slice
  replicate_scatter_peers,  ///< replicate waits until peers have summed the slot, before zeroing it
  optimizer_reduced,        ///< compute waits until a unit's gradient shard is complete
  offload_fetched,          ///< compute, reduce or replicate waits for a staging slot: its content, or its last store
  offload_used,             ///< copy waits until they have read or written a staging slot
  offload_stored,           ///< compute waits until masters are in host memory
  optimizer_exchange,       ///< compute waits for a collective of an optimizer (Muon), or that collective for compute
  optimizer_peers_read,     ///< compute waits until peers have read what an optimizer (Muon) has sent
  norm_peers_read,          ///< compute waits until peers have read the last norm, before writing the next
  collective_peer_ready,    ///< a local collective waits until a peer's input is ready
  collective_peer_partial,  ///< a local all-reduce waits until a peer's share of the sum is ready
  count_                    ///< number of sites
};

inline constexpr std::array<std::string_view, static_cast<std::size_t>(WaitSite::count_)> wait_site_names{
    "none",
    "compute_unsharded",
    "compute_gradient_slot",
    "gather_slot_read",
    "gather_peers_read",
    "gather_updated",
    "gather_kept_slice",
    "reduce_gradients",
    "reduce_peers_read",
    "reduce_partial_read",
    "reduce_wire_read",
    "replicate_scattered",
    "replicate_peers_read",
    "replicate_scatter_peers",
    "optimizer_reduced",
    "offload_fetched",
    "offload_used",
    "offload_stored",
    "optimizer_exchange",
    "optimizer_peers_read",
    "norm_peers_read",
    "collective_peer_ready",
    "collective_peer_partial",
};

constexpr std::string_view name(WaitSite site) { return wait_site_names[static_cast<std::size_t>(site)]; }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
