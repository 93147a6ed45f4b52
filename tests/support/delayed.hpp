// SPDX-License-Identifier: Apache-2.0
// A communicator that sleeps before each collective, and whose device sleeps before each kernel, copy and zeroing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "fsdp/concepts.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/forwarding.hpp"

namespace toy {

/// Every rank draws its delays from a sequence of its own, on its host thread: the same seed repeats them.
template <class C>
class Delayed : public fsdp::testing::Forwarding<Delayed<C>, C> {
  using Base = fsdp::testing::Forwarding<Delayed<C>, C>;

 public:
  using Device = fsdp::testing::DelayDevice<typename C::Device>;
  using Stream = typename Device::Stream;

  /// @param at_most  microseconds; 0: no delays
  Delayed(C inner, std::uint64_t seed, std::int64_t at_most)
      : Base(std::move(inner)),
        device_(Base::device(), seed * 1009 + static_cast<std::uint64_t>(Base::rank()), at_most) {}

  Device const& device() const { return device_; }
  Delayed split(int color, int key, std::string_view name) {
    return Delayed(this->inner().split(color, key, name), device_);
  }
  void before(Stream& stream, fsdp::Label) { device_.pause(stream); }

 private:
  Delayed(C inner, Device device) : Base(std::move(inner)), device_(std::move(device)) {}

  Device device_;
};

}  // namespace toy
