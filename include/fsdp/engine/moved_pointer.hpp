// SPDX-License-Identifier: Apache-2.0
// A pointer that is null after its owner was moved from.
#pragma once

#include <string_view>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Points to an object of its owner; null after the owner was moved from, so that its use throws.
template <class T>
class MovedPointer {
 public:
  explicit MovedPointer(T* pointer) : pointer_(pointer) {}
  MovedPointer(MovedPointer&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  MovedPointer& operator=(MovedPointer&& other) noexcept {
    pointer_ = std::exchange(other.pointer_, nullptr);
    return *this;
  }
  /// @throws UsageError if `what`, its owner, was moved from
  T* get(std::string_view what) const {
    FSDP_EXPECTS(pointer_ != nullptr, "{} was used after it was moved from", what);
    return pointer_;
  }
  bool is_set() const { return pointer_ != nullptr; }

 private:
  T* pointer_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
