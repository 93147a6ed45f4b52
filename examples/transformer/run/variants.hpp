// SPDX-License-Identifier: Apache-2.0
// The runs that `bench` and `plan` compare.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transformer/run/settings.hpp"

namespace transformer {

/// Values that batch_size and activation_checkpointing take in turn.
struct Variants {
  std::vector<std::int64_t> batch_sizes;
  std::vector<std::string> recomputation;
};

/// @param usual  batch sizes if the setting batch_sizes is empty
/// @throws fsdp::ConfigError if batch_sizes has anything but positive whole numbers
Variants variants_of(Settings const& settings, std::vector<std::int64_t> const& usual);

}  // namespace transformer
