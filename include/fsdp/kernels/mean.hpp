// SPDX-License-Identifier: Apache-2.0
// The mean over ranks, by any communicator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fsdp/concepts.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels {

/// The factor that makes a sum over N ranks a mean (average): 1/N. All code that takes a mean multiplies by it once, in
/// fp32.
constexpr float mean_factor(int ranks) { return 1.0f / static_cast<float>(ranks); }

/// The mean over ranks of `count` elements, to every rank: the sum of all_reduce, times mean_factor(size()). By the
/// communicator where it TakesMeans, otherwise in a pass of its own. The bits are the same.
/// @note Stream: as all_reduce
/// @note Collective: one all_reduce or all_reduce_mean
template <Communicator C>
Ticket all_reduce_mean(C& comm, typename C::Device::Stream& stream, float const* send, float* recv, std::size_t count,
                       Label label) {
  if constexpr (TakesMeans<C>) {
    return comm.all_reduce_mean(stream, send, recv, count, label);
  } else {
    auto const ticket = comm.all_reduce(stream, send, recv, count, label);
    if (send == recv) comm.wait_for_peers(stream, ticket, WaitSite::replicate_peers_read);
    scale(comm.device(), stream, recv, static_cast<std::int64_t>(count), mean_factor(comm.size()));
    return ticket;
  }
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels
