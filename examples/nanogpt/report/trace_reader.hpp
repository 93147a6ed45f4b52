// SPDX-License-Identifier: Apache-2.0
// Spans of all ranks, read from the file that --trace writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <istream>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/trace/trace.hpp"

namespace nanogpt::report {

struct Trace {
  std::vector<std::vector<fsdp::TraceSpan>> ranks;  ///< each in the order of the file, which is that of enqueueing
  std::size_t spans = 0;
  bool cut = false;  ///< the file has more than was read
};

/// Bounds of what is read: a page shows one step of a few ranks.
struct TraceLimits {
  std::size_t spans = 300'000;
  std::size_t ranks = 1024;
};

/// Reads a Chrome trace as fsdp::chrome_trace writes it; other events are passed over.
/// @return nullopt if it is none, or has no spans
std::optional<Trace> read_trace(std::istream& stream, TraceLimits limits = {});

/// Reads the first of the files that has spans. One that is not there is looked for in `folder` too, by its name.
std::optional<Trace> read_first_trace(std::vector<std::string> const& files, std::filesystem::path const& folder);

}  // namespace nanogpt::report
