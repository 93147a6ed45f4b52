// SPDX-License-Identifier: Apache-2.0
// The least device and communicator that the concepts accept, which serve engines in fp32: they have no other types.
// Declarations only: nothing here is ever linked.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/concepts.hpp"

namespace compile_fail {

struct Device {
  struct Stream {};
  struct Event {};
  static constexpr std::string_view name = "model";
  Stream make_stream(std::string_view, fsdp::StreamPriority) const;
  Event make_event() const;
  void* allocate(std::size_t) const;
  void deallocate(void*, std::size_t) const noexcept;
  void copy_async(Stream&, void*, void const*, std::size_t) const;
  void zero_async(Stream&, void*, std::size_t) const;
  void record(Event&, Stream&) const;
  void wait(Stream&, Event const&, fsdp::WaitSite) const;
  void synchronize(Stream&) const;
  void synchronize(Event const&) const;
  template <class Kernel, class... Args>
  void launch(Stream&, std::int64_t, Kernel, Args...) const;
};
static_assert(fsdp::Device<Device>);

struct Communicator {
  using Device = compile_fail::Device;
  int rank() const;
  int size() const;
  Device const& device() const;
  Communicator split(int, int, std::string_view);
  void* allocate(std::size_t);
  void deallocate(void*, std::size_t) noexcept;
  fsdp::Ticket all_gather(Device::Stream&, float const*, float*, std::size_t, fsdp::Label);
  fsdp::Ticket reduce_scatter(Device::Stream&, float const*, float*, std::size_t, fsdp::Label);
  fsdp::Ticket all_reduce(Device::Stream&, float const*, float*, std::size_t, fsdp::Label);
  fsdp::Ticket all_reduce(Device::Stream&, double const*, double*, std::size_t, fsdp::Label);
  fsdp::Ticket broadcast(Device::Stream&, float*, std::size_t, int, fsdp::Label);
  void wait_for_peers(Device::Stream&, fsdp::Ticket, fsdp::WaitSite);
  std::vector<std::string> exchange(std::string, std::string_view);
};
static_assert(fsdp::Communicator<Communicator>);

}  // namespace compile_fail
