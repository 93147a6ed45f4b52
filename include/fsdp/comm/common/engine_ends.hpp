// SPDX-License-Identifier: Apache-2.0
// Compares over ranks the last events of engines when the run ends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "fsdp/comm/common/call_note.hpp"
#include "fsdp/difference.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/format.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm {

/// The end of one engine on one rank. Trivially copyable: MPI moves it.
struct EngineEnd {
  std::uint64_t world = 0;         ///< number of the engine's communicator, equal on its ranks and no other's
  std::int64_t engine = 0;         ///< its number in its mesh
  std::array<char, 80> history{};  ///< text of the rank's detail::History

  std::string said() const {
    return history[0] == '\0' ? std::string("without any step")
                              : formatted("after {}", std::string_view(history.data()));
  }
};

/// The latest ends of one rank's engines.
class EngineEnds {
 public:
  /// Adds an end. Without memory for it, the engine is not compared.
  void add(std::uint64_t world, int engine, std::string_view history) noexcept {
    try {
      if (list_.empty()) list_ = fsdp::detail::FixedArray<EngineEnd>(most);
      if (size_ == most) {
        for (std::size_t i = 1; i < most; ++i) list_[i - 1] = list_[i];
        --size_;
      }
      list_[size_++] = {world, engine, cut<80>(history)};
    } catch (...) {
    }
  }
  std::span<EngineEnd const> list() const { return {list_.begin(), size_}; }
  void clear() { size_ = 0; }

 private:
  static constexpr std::size_t most = 256;
  fsdp::detail::FixedArray<EngineEnd> list_;  ///< empty, or room for the most
  std::size_t size_ = 0;
};

/// A sentence about one engine's ends on two ranks.
[[gnu::cold]] inline std::string differing_ends(EngineEnd const& one, int rank, EngineEnd const& other,
                                                int other_rank) {
  auto const value = fsdp::detail::value_that_differs(one.history.data(), rank, other.history.data(), other_rank);
  return formatted(
      "ranks ended after different steps: {}{}engine {} of its mesh ended {} on rank {}, and {} on rank {}", value,
      value.empty() ? "" : "; ", one.engine, one.said(), rank, other.said(), other_rank);
}
/// @param by_rank  the ends of each rank's engines
/// @return the first difference, as a sentence; "" if there is none. An engine that one rank alone has ended counts not
[[gnu::cold]] inline std::string difference(fsdp::detail::FixedArray<std::span<EngineEnd const>> const& by_rank) {
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
    for (auto const& own : by_rank[rank])
      for (auto other = rank + 1; other < by_rank.size(); ++other)
        for (auto const& theirs : by_rank[other])
          if (theirs.world == own.world && theirs.engine == own.engine && theirs.history != own.history)
            return differing_ends(own, static_cast<int>(rank), theirs, static_cast<int>(other));
  return {};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm
