// SPDX-License-Identifier: Apache-2.0
// An object on the heap that has one owner.
#pragma once

#include <utility>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Owns an object, like std::unique_ptr. With C++20, <memory> of libstdc++ takes compilers a tenth of the time of all
/// of fsdp.hpp.
template <class T>
class Owned {
 public:
  Owned() = default;
  /// @param object  of `new`, or nullptr
  explicit Owned(T* object) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { delete object_; }

  T* get() const { return object_; }
  /// @return the object; it has no owner now
  T* release() { return std::exchange(object_, nullptr); }
  T& operator*() const { return *object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
