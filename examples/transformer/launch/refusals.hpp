// SPDX-License-Identifier: Apache-2.0
// Checks that end a run on all ranks alike, so that no rank waits for one that has failed.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "transformer/launch/agree.hpp"
#include "transformer/launch/exit.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

/// Ends a rank for what all ranks know to be wrong. Rank 0 says it, and so do ranks whose job tells them to: where
/// every machine has a launcher of its own, the first rank of each.
/// @return the exit code
inline int refuse(int rank, Job const& job, std::string const& why) {
  if (rank == 0 || job.says_refusals) report_error(why);
  return usage_error;
}

/// @throws AgreedError on every rank if ranks have chosen other devices or element types, as they may on machines that
/// differ
/// @note Collective: yes; blocks.
template <class C>
void expect_same_device(C& world, Job const& job) {
  auto const texts = world.exchange(fmt::format("{} in {}", job.device, job.dtype), "devices");
  auto const device_of = [&](std::size_t rank) { return texts[rank].substr(0, texts[rank].find(' ')); };
  for (std::size_t rank = 1; rank < texts.size(); ++rank)
    if (texts[rank] != texts[0])
      fsdp::fail<AgreedError>(
          "ranks compute on different devices or in different element types: rank 0 uses {}, rank {} uses {}; expected "
          "{}",
          texts[0], rank, texts[rank],
          device_of(rank) == device_of(0) ? "one type on all ranks, for example --dtype=float32"
                                          : "--device=cpu, or a GPU for every rank");
}

/// @throws fsdp::ConfigError naming the first setting in which this rank differs from rank 0
/// @note Collective: yes; blocks.
template <class C>
void expect_same_settings(C& world, Settings const& settings) {
  std::string mine;
  for (auto const& setting : all_settings()) mine += fmt::format("{}={}\n", setting.name, setting.text_of(settings));
  auto const first = fsdp::comm::ask_first_rank(world, mine, "settings", fsdp::comm::text_of_first);
  if (first == mine) return;
  auto const differs = static_cast<std::size_t>(
      std::mismatch(mine.begin(), mine.end(), first.begin(), first.end()).first - mine.begin());
  auto const line_of = [&](std::string const& text) {
    auto const begin = text.rfind('\n', differs == 0 ? 0 : differs - 1);
    auto const from = begin == std::string::npos ? 0 : begin + 1;
    return text.substr(from, text.find('\n', from) - from);
  };
  fsdp::fail<fsdp::ConfigError>(
      "ranks have different settings: rank 0 has {}, rank {} has {}; start all ranks with the same settings and config "
      "files",
      line_of(first), world.rank(), line_of(mine));
}

}  // namespace transformer
