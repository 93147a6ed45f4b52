// SPDX-License-Identifier: Apache-2.0
// Texts that ranks exchange on the control plane: descriptions to compare, and a few doubles to average.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::detail {

/// A unit's layout, a line per tensor.
[[gnu::cold]] inline std::string text_of(std::string_view unit, FlatLayout const& layout) {
  auto lines = formatted("unit '{}' of {} elements\n", unit, layout.padded());
  for (auto const& tensor : layout.tensors())
    lines += formatted("unit '{}': tensor '{}' ({}) at {}, decay {}, init {}\n", unit, tensor.name,
                       listed(tensor.shape), tensor.offset, tensor.decay, to_text(tensor.init));
  return lines;
}

/// @param what the texts are: see Communicator::exchange
/// @throws Failure on every rank if any two ranks' texts differ, naming the first line that does
/// @note Collective: yes.
template <class Failure = ConfigError, class C>
[[gnu::cold]] void expect_equal_texts(C& world, std::string const& mine, std::string_view what) {
  auto const texts = world.exchange(mine, what);
  auto const line = [](std::string const& text, std::size_t& at) {
    auto const end = std::min(text.find('\n', at), text.size());
    auto const found = text.substr(at, end - at);
    at = std::min(end + 1, text.size());
    return found;
  };
  for (std::size_t other = 1; other < texts.size(); ++other) {
    if (texts[other] == texts[0]) continue;
    std::size_t a = 0, b = 0;
    while (a < texts[0].size() || b < texts[other].size()) {
      auto const ours = line(texts[0], a), theirs = line(texts[other], b);
      if (ours != theirs)
        fail<Failure>("rank {}: ranks disagree: rank 0 has \"{}\", rank {} has \"{}\"; expected the same on all ranks",
                      world.rank(), ours, other, theirs);
    }
  }
}

/// @param history  what ranks have done: must be equal
/// @throws OrderError on every rank if it is not
/// @note Collective: yes; blocks.
template <class C>
[[gnu::cold]] std::vector<double> mean_over_ranks(C& world, std::vector<double> const& values,
                                                  std::string_view history) {
  auto const bytes = values.size() * sizeof(double);
  std::string mine(bytes, '\0');
  if (!values.empty()) std::memcpy(mine.data(), values.data(), bytes);
  mine += formatted("\n{} values", values.size());
  if (!history.empty()) mine += formatted(" after {}", history);
  std::vector<double> mean(values.size()), theirs(values.size());
  auto const texts = world.exchange(mine, "values to average");
  auto const said = [](std::string const& text) { return std::string_view(text).substr(text.rfind('\n') + 1); };
  for (auto const& text : texts) {
    if (said(text) != said(mine))
      fail<OrderError>("rank {}: ranks disagree: this rank averages {}, rank {} averages {}", world.rank(), said(mine),
                       &text - texts.data(), said(text));
    if (!values.empty()) std::memcpy(theirs.data(), text.data(), bytes);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += theirs[i];
  }
  for (auto& value : mean) value /= static_cast<double>(texts.size());
  return mean;
}

}  // namespace fsdp::detail
