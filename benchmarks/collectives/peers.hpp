// SPDX-License-Identifier: Apache-2.0
// Buffers of a rank, and addresses of its peers' buffers for the plain operation.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/concepts.hpp"
#include "timing.hpp"

namespace bench {

/// Collective memory of `bytes` on every rank, filled with zeros.
template <class C>
class Area {
 public:
  Area(C& comm, typename C::Device::Stream& stream, std::size_t bytes)
      : comm_(comm), bytes_(bytes), own_(static_cast<std::byte*>(comm.allocate(bytes))) {
    comm.device().zero_async(stream, own_, bytes);
    comm.device().synchronize(stream);
    comm.exchange({}, "peers");
  }
  Area(Area const&) = delete;
  Area& operator=(Area const&) = delete;
  ~Area() { comm_.deallocate(own_, bytes_); }

  std::byte* data() const { return own_; }
  std::size_t bytes() const { return bytes_; }

 private:
  C& comm_;
  std::size_t bytes_;
  std::byte* own_;
};

/// Whether all ranks are processes that share memory. What a machine is called does not tell: its containers and
/// network namespaces share none.
template <class C>
bool share_memory(C const& comm) {
  if constexpr (requires { comm.ranks_on_node(); })
    return comm.ranks_on_node().size() == static_cast<std::size_t>(comm.size());
  return false;
}

/// Every rank's address of an area as this rank may read it; empty where it cannot.
///
/// Ranks of one process read each other's pointers. mpi::Communicator lays the ranks' blocks of a node side by side,
/// a whole number of pages apart: whether that holds here is read out of the blocks themselves.
/// @note Collective: yes.
template <class C>
std::vector<std::byte*> peers_of(C& comm, Area<C> const& area, std::string_view kind) {
  std::vector<std::byte*> all;
  auto const texts = comm.exchange(std::to_string(reinterpret_cast<std::uintptr_t>(area.data())), "peers");
  if (kind == "local") {
    for (auto const& text : texts)
      all.push_back(reinterpret_cast<std::byte*>(std::strtoull(text.c_str(), nullptr, 10)));
    return all;
  }
  if (!share_memory(comm)) return {};
  auto const page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto const stride = static_cast<std::ptrdiff_t>((area.bytes() + page - 1) / page * page);
  for (int rank = 0; rank < comm.size(); ++rank) all.push_back(area.data() + (rank - comm.rank()) * stride);
  auto& own = *reinterpret_cast<std::uint64_t*>(area.data());
  own = 0x5eed0000u + static_cast<std::uint64_t>(comm.rank());
  comm.exchange({}, "peers");
  bool found = true;
  for (int rank = 0; rank < comm.size(); ++rank)
    found = found && *reinterpret_cast<std::uint64_t*>(all[static_cast<std::size_t>(rank)]) ==
                         0x5eed0000u + static_cast<std::uint64_t>(rank);
  for (auto const& text : comm.exchange(found ? "found" : "lost", "peers"))
    if (text != "found") all.clear();
  own = 0;
  return all;
}

}  // namespace bench
