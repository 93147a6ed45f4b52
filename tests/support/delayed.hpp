// SPDX-License-Identifier: Apache-2.0
// A communicator that sleeps before each collective, and whose device sleeps before each kernel, copy and zeroing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "tests/support/devices.hpp"

namespace toy {

/// Every rank draws its delays from a sequence of its own, on its host thread: the same seed repeats them.
template <class C>
class Delayed {
 public:
  using Device = fsdp::testing::DelayDevice<typename C::Device>;
  using Stream = typename Device::Stream;

  /// @param at_most  microseconds; 0: no delays
  Delayed(C inner, std::uint64_t seed, std::int64_t at_most)
      : inner_(std::move(inner)),
        device_(inner_.device(), seed * 1009 + static_cast<std::uint64_t>(inner_.rank()), at_most) {}

  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  Device const& device() const { return device_; }
  Delayed split(int color, int key, std::string_view name) { return Delayed(inner_.split(color, key, name), device_); }
  void* allocate(std::size_t bytes) { return inner_.allocate(bytes); }
  void deallocate(void* memory, std::size_t bytes) noexcept { inner_.deallocate(memory, bytes); }
  template <class T>
  fsdp::Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, fsdp::Label label) {
    device_.pause(stream);
    return inner_.all_gather(stream, send, recv, count, label);
  }
  template <class T>
  fsdp::Ticket reduce_scatter(Stream& stream, T const* send, T* recv, std::size_t count, fsdp::Label label) {
    device_.pause(stream);
    return inner_.reduce_scatter(stream, send, recv, count, label);
  }
  template <class T>
  fsdp::Ticket all_reduce(Stream& stream, T const* send, T* recv, std::size_t count, fsdp::Label label) {
    device_.pause(stream);
    return inner_.all_reduce(stream, send, recv, count, label);
  }
  template <class T>
  fsdp::Ticket broadcast(Stream& stream, T* buffer, std::size_t count, int root, fsdp::Label label) {
    device_.pause(stream);
    return inner_.broadcast(stream, buffer, count, root, label);
  }
  void wait_for_peers(Stream& stream, fsdp::Ticket ticket, fsdp::WaitSite site) {
    inner_.wait_for_peers(stream, ticket, site);
  }
  std::vector<std::string> exchange(std::string const& mine, std::string_view what) {
    return inner_.exchange(mine, what);
  }

 private:
  Delayed(C inner, Device device) : inner_(std::move(inner)), device_(std::move(device)) {}

  C inner_;
  Device device_;
};

}  // namespace toy
