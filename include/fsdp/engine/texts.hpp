// SPDX-License-Identifier: Apache-2.0
// Texts of the control plane: descriptions that ranks compare, and a few doubles to average.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/consult.hpp"
#include "fsdp/difference.hpp"
#include "fsdp/error.hpp"
#include "fsdp/init.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// A unit's layout, a line per tensor.
[[gnu::cold]] inline std::string text_of(std::string_view unit, FlatLayout const& layout) {
  auto lines = formatted("unit '{}'\n", unit);
  for (auto const& tensor : layout.tensors())
    lines += formatted("unit '{}': tensor '{}' ({}) at {}, decay {}, init {}{}\n", unit, tensor.name,
                       listed(tensor.shape), tensor.offset, tensor.decay, to_text(tensor.init),
                       tensor.tag == 0 ? std::string() : formatted(", tag {}", tensor.tag));
  return lines;
}

/// Answer of rank 0: the first rank whose text differs from rank 0's; "" if all are equal.
[[gnu::cold]] inline std::string rank_that_differs(std::vector<std::string> const& texts) {
  for (std::size_t rank = 1; rank < texts.size(); ++rank)
    if (texts[rank] != texts[0]) return formatted("{}", rank);
  return {};
}

/// Answer of rank 0: the first line that differs in two texts, rank 0's and that of the only other rank that sends one.
/// @param texts  "=" and the text of these two
[[gnu::cold]] inline std::string line_that_differs(std::vector<std::string> const& texts) {
  std::size_t other = 1;
  while (texts[other].empty()) ++other;
  auto const line = [](std::string const& text, std::size_t& at) {
    auto const end = std::min(text.find('\n', at), text.size());
    auto const found = text.substr(at, end - at);
    at = std::min(end + 1, text.size());
    return found;
  };
  for (std::size_t a = 1, b = 1; a < texts[0].size() || b < texts[other].size();) {
    auto const ours = line(texts[0], a), theirs = line(texts[other], b);
    if (ours == theirs) continue;
    auto const value = value_that_differs(ours, 0, theirs, static_cast<int>(other));
    return formatted("{}{}rank 0 has \"{}\", rank {} has \"{}\"", value, value.empty() ? "" : "; ", ours, other,
                     theirs);
  }
  return formatted("rank {} has another text than rank 0", other);
}

/// Compares hashes; the texts themselves are sent by rank 0 and the first rank that differs, if one does.
/// @param what the texts are: see Communicator::exchange
/// @throws Failure on every rank if any two ranks' texts differ, naming the first line that does
/// @note Collective: yes.
template <class Failure = ConfigError, class C>
[[gnu::cold]] void expect_equal_texts(C& world, std::string const& mine, std::string_view what) {
  auto const digest = formatted("{} {:016x}", mine.size(), hash_name(mine));
  auto const rank = comm::consult(world, digest, what, rank_that_differs);
  if (rank.empty()) return;
  bool const concerned = world.rank() == 0 || formatted("{}", world.rank()) == rank;
  auto const lines = comm::consult(world, concerned ? "=" + mine : std::string(), what, line_that_differs);
  fail<Failure>("rank {}: ranks disagree: {}; expected the same on all ranks", world.rank(), lines);
}

/// Answer of rank 0: "=" and the mean of the ranks' doubles, added in the order of ranks; or, if their last lines
/// differ, "!" and two that differ. If one is not, with "!" and two that differ.
[[gnu::cold]] inline std::string mean_of(std::vector<std::string> const& texts) {
  auto const said = [](std::string const& text) { return std::string_view(text).substr(text.rfind('\n') + 1); };
  std::vector<double> mean(texts[0].rfind('\n') / sizeof(double)), theirs(mean.size());
  auto const bytes = mean.size() * sizeof(double);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (said(texts[rank]) != said(texts[0])) {
      auto const value = value_that_differs(said(texts[0]), 0, said(texts[rank]), static_cast<int>(rank));
      return formatted("!{}{}rank 0 averages {}, rank {} averages {}", value, value.empty() ? "" : "; ", said(texts[0]),
                       rank, said(texts[rank]));
    }
    if (bytes != 0) std::memcpy(theirs.data(), texts[rank].data(), bytes);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += theirs[i];
  }
  for (auto& value : mean) value /= static_cast<double>(texts.size());
  std::string answer(1 + bytes, '=');
  if (bytes != 0) std::memcpy(answer.data() + 1, mean.data(), bytes);
  return answer;
}

/// @param history  what ranks have done: must be equal
/// @throws OrderError on every rank if it is not
/// @note Collective: yes; blocks. Rank 0 adds, and sends the mean to all.
template <class C>
[[gnu::cold]] std::vector<double> mean_over_ranks(C& world, std::vector<double> const& values,
                                                  std::string_view history) {
  auto const bytes = values.size() * sizeof(double);
  std::string mine(bytes, '\0');
  if (!values.empty()) std::memcpy(mine.data(), values.data(), bytes);
  mine += formatted("\n{} values", values.size());
  if (!history.empty()) mine += formatted(" after {}", history);
  auto const answer = comm::consult(world, mine, "values to average", mean_of);
  if (answer[0] != '=') fail<OrderError>("rank {}: ranks disagree: {}", world.rank(), answer.substr(1));
  std::vector<double> mean(values.size());
  if (!values.empty()) std::memcpy(mean.data(), answer.data() + 1, bytes);
  return mean;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
