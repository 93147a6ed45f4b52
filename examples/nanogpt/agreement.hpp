// SPDX-License-Identifier: Apache-2.0
// Checks that end a run on all ranks alike, so that nobody waits for a rank that has given up.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "fsdp/error.hpp"
#include "job.hpp"
#include "settings.hpp"

namespace nanogpt {

/// What a rank found wrong, thrown on every rank.
struct AgreedError : fsdp::Error {
  using Error::Error;
};

/// Runs `check` on this rank. If it throws on any rank, every rank throws AgreedError with the text of the lowest.
/// @note Collective: yes; blocks.
template <class C, class Check>
void agree(C& world, Check&& check) {
  std::string problem;
  try {
    std::forward<Check>(check)();
  } catch (std::exception const& error) {
    problem = error.what();
    if (problem.empty()) problem = "an error without a text";
  }
  for (auto const& text : world.exchange(problem, "problems"))
    if (!text.empty()) throw AgreedError(text);
}

/// @throws AgreedError on every rank if ranks have chosen other devices or element types, as they may on machines that
/// differ
/// @note Collective: yes; blocks.
template <class C>
void expect_same_device(C& world, Job const& job) {
  auto const texts = world.exchange(fmt::format("{} in {}", job.device, job.dtype), "devices");
  for (std::size_t rank = 1; rank < texts.size(); ++rank)
    if (texts[rank] != texts[0])
      fsdp::fail<AgreedError>(
          "ranks compute on different devices: rank 0 on {}, rank {} on {}; expected --device=cpu, or a GPU for every "
          "rank",
          texts[0], rank, texts[rank]);
}

/// @throws fsdp::ConfigError naming the first setting in which this rank differs from rank 0
/// @note Collective: yes; blocks.
template <class C>
void expect_same_settings(C& world, Settings const& settings) {
  std::string mine;
  for (auto const& setting : all_settings()) mine += fmt::format("{}={}\n", setting.name, setting.text_of(settings));
  auto const texts = world.exchange(mine, "settings");
  auto const& first = texts.front();
  if (first == mine) return;
  auto const differs = static_cast<std::size_t>(
      std::mismatch(mine.begin(), mine.end(), first.begin(), first.end()).first - mine.begin());
  auto const line_of = [&](std::string const& text) {
    auto const begin = text.rfind('\n', differs == 0 ? 0 : differs - 1);
    auto const from = begin == std::string::npos ? 0 : begin + 1;
    return text.substr(from, text.find('\n', from) - from);
  };
  fsdp::fail<fsdp::ConfigError>("ranks have different settings: rank 0 has {}, rank {} has {}", line_of(first),
                                world.rank(), line_of(mine));
}

}  // namespace nanogpt
