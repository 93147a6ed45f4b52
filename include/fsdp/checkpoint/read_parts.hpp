// SPDX-License-Identifier: Apache-2.0
// Compares over ranks which tensors an import gives.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "fsdp/consult.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Records for each tensor whether this rank was given all its parts.
class ReadParts {
 public:
  /// @param tensor   counted over all units
  /// @param is_read  false: this rank's part stays as it is
  void add(std::size_t tensor, bool is_read) {
    if (signs_.size() <= tensor) signs_.resize(tensor + 1, ' ');
    signs_[tensor] = is_read ? '+' : '-';
  }

  /// All ranks that keep parts of a tensor were given them, or none.
  /// @throws ConfigError on every rank if they differ, naming the first tensor and two ranks
  /// @note Collective: yes; rank 0 receives a character a tensor of every rank.
  template <class E>
  [[gnu::cold]] void expect_whole_tensors(E& engine) const {
    auto const problem = comm::consult(engine.world(), signs_, "imported tensors", [&](auto const& texts) {
      std::size_t tensor = 0;
      auto const shards = engine.shards();
      for (std::size_t u = 0; u < shards.size(); ++u) {
        for (auto const& info : shards[u].layout().tensors()) {
          auto const given = first_with('+', tensor, texts), left = first_with('-', tensor, texts);
          ++tensor;
          if (given < texts.size() && left < texts.size())
            return formatted("tensor '{}' was given on rank {} and left as it is on rank {}", info.name, given, left);
        }
      }
      return std::string();
    });
    if (!problem.empty())
      fail<ConfigError>("rank {}: ranks differ in what they import: {}. Give it on all ranks or on none", engine.rank(),
                        problem);
  }

 private:
  static std::size_t first_with(char sign, std::size_t tensor, std::vector<std::string> const& texts) {
    std::size_t rank = 0;
    while (rank < texts.size() && (texts[rank].size() <= tensor || texts[rank][tensor] != sign)) ++rank;
    return rank;
  }

  std::string signs_;  ///< one for each tensor: '+' given, '-' left, ' ' not here
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
