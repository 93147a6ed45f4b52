// SPDX-License-Identifier: Apache-2.0
// Page-locked host memory for asynchronous copies.
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A device with page-locked host memory of its own: copies to and from other memory may block the caller there.
template <class D>
concept PinsMemory = requires(D const device, std::size_t bytes, void* memory) {
  { device.allocate_pinned(bytes) } -> std::same_as<void*>;
  device.deallocate_pinned(memory);
};

/// `count` elements of host memory that device D copies from and to while the caller goes on.
template <class D, class T>
class Staging {
 public:
  Staging(D const& device, std::size_t count) : memory_(allocate(device, count), Free{device}) {}

  T* data() const { return memory_.get(); }

 private:
  struct Free {
    D device;
    void operator()(T* memory) const noexcept {
      if constexpr (PinsMemory<D>) {
        device.deallocate_pinned(memory);
      } else {
        delete[] memory;
      }
    }
  };
  static T* allocate(D const& device, std::size_t count) {
    if constexpr (PinsMemory<D>) {
      return static_cast<T*>(device.allocate_pinned(count * sizeof(T)));
    } else {
      static_cast<void>(device);
      return new T[count];  // not zeroed
    }
  }

  std::unique_ptr<T[], Free> memory_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
