// SPDX-License-Identifier: Apache-2.0
#include "transformer/run/variants.hpp"

#include "fsdp/error.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/read_number.hpp"

namespace transformer {

Variants variants_of(Settings const& settings, std::vector<std::int64_t> const& usual) {
  Variants variants{usual, {settings.activation_checkpointing}};
  if (!settings.batch_sizes.empty()) {
    variants.batch_sizes.clear();
    for (auto const& word : words_of(settings.batch_sizes)) {
      std::int64_t size{};
      if (!read_number(word, size) || size < 1 || size > 1'000'000)
        fsdp::fail<fsdp::ConfigError>(
            "setting 'batch_sizes': expected whole numbers from 1 to 1000000, separated by commas, got '{}'",
            settings.batch_sizes);
      variants.batch_sizes.push_back(size);
    }
  }
  if (settings.activation_checkpointing == "both") variants.recomputation = {"false", "true"};
  return variants;
}

}  // namespace transformer
