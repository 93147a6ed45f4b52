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

#include "fsdp/trace.hpp"
#include "transformer/report/log_reader.hpp"

namespace transformer::report {

struct Trace {
  std::string run_id;                               ///< of the start of a run that wrote it; empty: not said
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

struct FoundTrace {
  std::optional<Trace> trace;
  std::string missing;  ///< a sentence that says why there is none; empty if no file was named
};
/// Reads the first of the files that has spans of the start that was to write it: another run may have written its own
/// over it. Each is looked for in `folder` too, by its name.
FoundTrace read_first_trace(std::vector<TraceFile> const& files, std::filesystem::path const& folder);

}  // namespace transformer::report
