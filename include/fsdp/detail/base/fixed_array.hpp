// SPDX-License-Identifier: Apache-2.0
// An array of fixed size on the heap.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// An array whose size is fixed at construction. Engines use it where a list does not grow: a std::vector of each
/// element type takes compilers several times as long.
template <class T>
class FixedArray {
 public:
  FixedArray() = default;
  explicit FixedArray(std::size_t size) : data_(new T[size]{}), size_(size) {}
  FixedArray(FixedArray const& other) : FixedArray(other.size_) { std::copy(other.begin(), other.end(), data_); }
  FixedArray(FixedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  FixedArray& operator=(FixedArray other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  [[gnu::cold, gnu::noinline]] ~FixedArray() { delete[] data_; }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](std::size_t index) { return data_[index]; }
  T const& operator[](std::size_t index) const { return data_[index]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  T const* begin() const { return data_; }
  T const* end() const { return data_ + size_; }
  T& back() { return data_[size_ - 1]; }
  T const& back() const { return data_[size_ - 1]; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
