// SPDX-License-Identifier: Apache-2.0
// Ids of special tokens in the config.json of a model.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"

namespace transformer {

/// Checks bos_token_id and eos_token_id: each is missing, null, an id of the vocabulary, or a list of such ids.
/// @param vocab_size  the model's
/// @param unset       an id that stands for none, whatever the vocabulary
/// @param what        the config is, for messages: "'path'"
/// @throws fsdp::ConfigError naming the field and the ids that are possible
inline void expect_special_ids(fsdp::checkpoint::Json const& config, std::int64_t vocab_size, std::string_view what,
                               std::optional<std::int64_t> unset = std::nullopt) {
  using fsdp::checkpoint::Json;
  auto const is_id = [&](Json const& value) {
    if (!value.is_number_unsigned()) return false;
    auto const id = value.get<std::uint64_t>();
    return id < static_cast<std::uint64_t>(vocab_size) || (unset && id == static_cast<std::uint64_t>(*unset));
  };
  for (char const* const name : {"bos_token_id", "eos_token_id"}) {
    auto const found = config.find(name);
    if (found == config.end() || found->is_null()) continue;
    bool fits = found->is_array() || is_id(*found);
    if (found->is_array())
      for (auto const& value : *found) fits = fits && is_id(value);
    if (!fits)
      fsdp::checkpoint::Fields(config, what)
          .wrong(name, fsdp::formatted("ids of the vocabulary, from 0 to {}", vocab_size - 1));
  }
}

}  // namespace transformer
