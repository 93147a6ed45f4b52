// SPDX-License-Identifier: Apache-2.0
// Initial values of a unit that the caller gives: see Shards::set_initial_values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace fsdp {

struct TensorInfo;

namespace detail {

/// A function that was given to Shards::set_initial_values.
class InitialValues {
 public:
  virtual ~InitialValues() = default;
  /// @param first  element of the tensor that belongs into out[0]
  virtual void fill(TensorInfo const& tensor, std::int64_t first, float* out, std::int64_t elements) = 0;
};

template <class F>
class InitialValuesOf final : public InitialValues {
 public:
  explicit InitialValuesOf(F f) : f_(std::move(f)) {}
  void fill(TensorInfo const& tensor, std::int64_t first, float* out, std::int64_t elements) override {
    f_(tensor, first, std::span<float>(out, static_cast<std::size_t>(elements)));
  }

 private:
  F f_;
};

}  // namespace detail
}  // namespace fsdp
