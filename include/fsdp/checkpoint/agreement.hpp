// SPDX-License-Identifier: Apache-2.0
// Steps that all ranks take, or none: what one rank cannot do, every rank reports.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"

namespace fsdp::checkpoint {

/// Runs `act()` on this rank, which returns a text for all ranks. If it throws on any rank, every rank throws the same
/// error: that of the lowest rank, a ResourceError where that was one, else a ConfigError.
/// @param what  it is, in a word or two, the same on every rank
/// @return all ranks' texts
/// @note Collective: yes; blocks the calling thread.
template <class C, class Act>
std::vector<std::string> agreed(C& world, std::string_view what, Act&& act) {
  std::string mine;
  try {
    mine = "=" + std::string(std::forward<Act>(act)());
  } catch (ResourceError const& error) {
    mine = std::string("R") + error.what();
  } catch (std::exception const& error) {
    mine = std::string("C") + error.what();
  }
  auto texts = world.exchange(mine, what);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    auto const& text = texts[rank];
    auto const where = texts.size() == 1 ? std::string() : formatted("rank {}: ", rank);
    if (text[0] == 'R') fail<ResourceError>("{}{}", where, text.substr(1));
    if (text[0] == 'C') fail<ConfigError>("{}{}", where, text.substr(1));
  }
  for (auto& text : texts) text.erase(0, 1);
  return texts;
}

}  // namespace fsdp::checkpoint
