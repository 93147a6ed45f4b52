// SPDX-License-Identifier: Apache-2.0
// The reference of a collective: the copies and sums that it needs at least, without synchronisation of ranks.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/comm/pairwise.hpp"
#include "fsdp/host.hpp"
#include "settings.hpp"

namespace bench {

/// Description of the plain operation, for the table's head.
inline std::string describe_plain(Collective collective, bool peers_memory) {
  std::string const where = peers_memory ? "peers' buffers" : "buffers of the rank's own GPU (peers' are out of reach)";
  switch (collective) {
    case Collective::all_gather:
      return "memcpy of the n-1 other slices (out of place: of all n) out of " + where +
             ", all ranks at once, no waiting";
    case Collective::reduce_scatter:
      return "one loop that sums n slices, n-1 of them in " + where + ", into one, all ranks at once, no waiting";
    case Collective::all_reduce:
      return "one loop that sums n slices into one, then memcpy of n-1 slices, out of " + where +
             ", all ranks at once, no waiting";
  }
  return {};
}

namespace detail {

/// to[i] = sum of N inputs, by a loop of its own: not the library's kernel.
template <class T, std::size_t N>
void sum_of(std::array<T const*, N> from, T* to, std::size_t count) {
  using Sum = fsdp::Compute<T>;
  FSDP_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    auto sum = static_cast<Sum>(from[0][i]);
    for (std::size_t r = 1; r < N; ++r) sum += static_cast<Sum>(from[r][i]);
    to[i] = static_cast<T>(sum);
  }
}
template <std::size_t N, class T>
void sum_first(T const* const* from, T* to, std::size_t count) {
  std::array<T const*, N> inputs{};
  for (std::size_t r = 0; r < N; ++r) inputs[r] = from[r];
  sum_of(inputs, to, count);
}

}  // namespace detail

/// Runs the plain operations on a device; on the host at once, on the calling thread.
template <fsdp::Device D>
class Plain {
 public:
  static constexpr bool on_host = std::same_as<D, fsdp::host::Device>;

  explicit Plain(D const& device) : device_(device), stream_(make_stream(device)) {}

  void copy(void* to, void const* from, std::size_t bytes) { device_.copy_async(stream_, to, from, bytes); }

  /// @param from one pointer per rank; `to` may be one of them
  template <class T>
  void sum(std::vector<T const*> const& from, T* to, std::size_t count) {
    if constexpr (on_host) {
      switch (from.size()) {
        case 2: return detail::sum_first<2>(from.data(), to, count);
        case 3: return detail::sum_first<3>(from.data(), to, count);
        case 4: return detail::sum_first<4>(from.data(), to, count);
        case 8: return detail::sum_first<8>(from.data(), to, count);
        default: break;
      }
    }
    fsdp::pairwise::launch_sum(device_, stream_, from.data(), static_cast<int>(from.size()), to,
                               static_cast<std::int64_t>(count));
  }
  void finish() { device_.synchronize(stream_); }

 private:
  static typename D::Stream make_stream(D const& device) {
    if constexpr (on_host) {
      return D::Stream::inline_stream("plain");
    } else {
      return device.make_stream("plain", fsdp::StreamPriority::normal);
    }
  }
  D device_;
  typename D::Stream stream_;
};

}  // namespace bench
