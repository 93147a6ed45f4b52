// SPDX-License-Identifier: Apache-2.0
// A caller's function for initial values of a unit: see Shards::set_initial_values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "fsdp/fixed_array.hpp"
#include "fsdp/kernels/block.hpp"
#include "fsdp/precision.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

struct TensorInfo;

namespace detail {

/// A function of Shards::set_initial_values.
class InitialValues {
 public:
  virtual ~InitialValues() = default;
  /// @param first  index of the tensor's element that goes to the first of `out`
  /// @param type   of the elements of `out`: values are rounded to nearest even
  virtual void fill(TensorInfo const& tensor, std::int64_t first, std::int64_t count, std::byte* out, DType type) = 0;
};

template <class F>
class InitialValuesOf final : public InitialValues {
 public:
  explicit InitialValuesOf(F f) : f_(std::move(f)) {}
  void fill(TensorInfo const& tensor, std::int64_t first, std::int64_t count, std::byte* out, DType type) override {
    FixedArray<float> values(static_cast<std::size_t>(count));
    f_(tensor, first, std::span<float>(values.begin(), values.size()));
    if (type == DType::f32) round<float>(values, out);
    if (type == DType::bf16) round<bf16>(values, out);
    if (type == DType::f16) round<fp16>(values, out);
  }

 private:
  template <class T>
  static void round(FixedArray<float> const& values, std::byte* out) {
    for (auto const value : values) {
      T const rounded = narrow<T>(value);
      std::memcpy(out, &rounded, sizeof rounded);
      out += sizeof rounded;
    }
  }

  F f_;
};

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
