// SPDX-License-Identifier: Apache-2.0
// A tokenizer whose tokens are the characters of a text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// The characters of a text: ids are places in `symbols`. The marker may be among them, as one symbol.
class Characters final : public Tokenizer {
 public:
  /// @param symbols  id to symbol, in UTF-8
  /// @throws fsdp::ConfigError naming a symbol that stands there twice
  explicit Characters(std::vector<std::string> symbols);

  std::vector<std::string> const& symbols() const { return symbols_; }
  std::int64_t size() const override { return static_cast<std::int64_t>(symbols_.size()); }
  std::optional<std::int64_t> end_of_text() const override;
  /// @throws fsdp::ConfigError naming the first character that the vocabulary lacks, or the byte that is not UTF-8
  void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  std::string decode(std::span<std::int64_t const> ids) const override;
  std::size_t last_cut(std::string_view text) const override;

 private:
  std::vector<std::string> symbols_;
  std::unordered_map<std::string, std::int64_t> ids_;
};

}  // namespace transformer
