// SPDX-License-Identifier: Apache-2.0
// Steps that all ranks take, or none: an error on one rank is thrown on every rank.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/consult.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Answer of rank 0: the error of the lowest rank that has one ("R" or "C", and a text), else rank 0's text.
inline std::string error_or_first(std::vector<std::string> const& texts) {
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank][0] == '=') continue;
    auto const where = texts.size() == 1 ? std::string() : formatted("rank {}: ", rank);
    return texts[rank].substr(0, 1) + where + texts[rank].substr(1);
  }
  return texts[0];
}

/// Runs `act()` and says how it ended: "=" and the text that it returned, or "R" (a ResourceError) or "C" and the text
/// of its error.
template <class Act>
std::string ending_of(Act&& act) {
  try {
    return "=" + std::string(std::forward<Act>(act)());
  } catch (ResourceError const& error) {
    return std::string("R") + error.what();
  } catch (std::exception const& error) {
    return std::string("C") + error.what();
  }
}

/// Agrees on the endings of all ranks (`mine` is from ending_of): see agreed().
template <class C>
std::string agree_on(C& world, std::string_view what, std::string const& mine) {
  auto answer = comm::consult(world, mine, what, error_or_first);
  auto const kind = answer[0];
  answer.erase(0, 1);
  if (kind == 'R') fail<ResourceError>("{}", answer);
  if (kind == 'C') fail<ConfigError>("{}", answer);
  return answer;
}

/// Runs `act()` on this rank, which returns a text. If it throws on any rank, every rank throws the same
/// error: that of the lowest rank, a ResourceError where that was one, else a ConfigError.
/// @param what  it is, in a word or two, the same on every rank
/// @return rank 0's text
/// @note Collective: yes; blocks the calling thread.
template <class C, class Act>
std::string agreed(C& world, std::string_view what, Act&& act) {
  return agree_on(world, what, ending_of(std::forward<Act>(act)));
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
