// SPDX-License-Identifier: Apache-2.0
// The slice of a module's initial values that a rank keeps until its engine is sealed.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail {

/// @throws UsageError unless the parameter has elements that an fp32 holds, and values
inline void expect_elements(at::Tensor const& parameter, std::string_view name, int rank) {
  auto const type = parameter.scalar_type();
  FSDP_EXPECTS(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
               "rank {}: parameter '{}' has elements of type {}; expected float, bf16 or fp16", rank, name,
               std::string_view(c10::toString(type)));
  FSDP_EXPECTS(!parameter.is_meta(), "rank {}: parameter '{}' is on the meta device, without values", rank, name);
}

/// fp32 values in row-major order, in host memory.
inline at::Tensor values_of(at::Tensor const& parameter) {
  torch::NoGradGuard const no_grad;
  return parameter.detach().to(at::kCPU, at::kFloat).contiguous().view({-1});
}

/// Hash of a parameter's values, in two lanes of 8 bytes; equal on every machine of one byte order.
inline std::uint64_t hash_of(at::Tensor const& parameter) {
  auto const values = values_of(parameter);
  auto const bytes = static_cast<std::size_t>(values.numel()) * sizeof(float);
  auto const* const data = reinterpret_cast<char const*>(values.data_ptr<float>());
  constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
  std::uint64_t lanes[2] = {bytes, 1}, words[2];
  for (std::size_t at = 0; at < bytes; at += sizeof words) {
    words[0] = words[1] = 0;
    std::memcpy(words, data + at, bytes - at < sizeof words ? bytes - at : sizeof words);
    for (int i = 0; i < 2; ++i) lanes[i] = (((lanes[i] << 23) | (lanes[i] >> 41)) ^ words[i]) * odd;
  }
  return lanes[0] ^ (lanes[1] >> 32) ^ (lanes[1] << 32);
}

/// Values by tensor and first element: a function for Shards::set_initial_values.
class KeptValues {
 public:
  void add(std::string const& tensor, std::int64_t first, std::int64_t count, at::Tensor const& parameter) {
    auto const values = values_of(parameter);
    auto const* const from = values.data_ptr<float>() + first;
    parts_.push_back({tensor, first, std::vector<float>(from, from + count)});
  }
  void operator()(TensorInfo const& tensor, std::int64_t first, std::span<float> out) const {
    for (auto const& part : parts_) {
      if (part.tensor != tensor.name || part.first != first || part.values.size() != out.size()) continue;
      std::memcpy(out.data(), part.values.data(), out.size_bytes());
      return;
    }
    fail<UsageError>(
        "tensor '{}': this rank has not kept elements {} to {} of its initial values: tensors were added to its unit "
        "after Sharder::shard",
        tensor.name, first, first + static_cast<std::int64_t>(out.size()));
  }

 private:
  struct Part {
    std::string tensor;
    std::int64_t first;
    std::vector<float> values;
  };
  std::vector<Part> parts_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail
