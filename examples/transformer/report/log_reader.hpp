// SPDX-License-Identifier: Apache-2.0
// A run, read from its OUT/log.jsonl.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <istream>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/memory.hpp"

namespace transformer::report {

inline constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

/// A number that a line does not have, or that is none, is NaN.
struct Iteration {
  std::int64_t iteration = 0;
  double loss = unknown, learning_rate = unknown;
  double milliseconds = unknown;
  double tokens_per_second = unknown;
  double mfu = unknown;            ///< fraction
  double gradient_norm = unknown;  ///< before clipping
  double tokens = unknown;         ///< trained on before the iteration, in all starts of the run
  double seconds = unknown;        ///< of training until its end, in all starts of the run, evaluations included
};

struct Evaluation {
  std::int64_t iteration = 0;
  double train_loss = unknown, val_loss = unknown;
  double tokens = unknown, seconds = unknown;  ///< as of the iterations before it
};

/// A loss or a gradient norm that training has found to jump.
struct JumpRow {
  std::int64_t iteration = 0;
  std::string what;  ///< "loss" or "grad_norm"
  double value = unknown, median = unknown;
};

/// A text that the model wrote during training.
struct Sample {
  std::int64_t iteration = 0;
  std::string text;
};

/// Bytes by MemoryTag.
using BytesByTag = std::array<std::int64_t, static_cast<std::size_t>(fsdp::MemoryTag::count_)>;

struct Memory {
  BytesByTag reserved{};
  std::int64_t peak_state = 0;  ///< most in use at once of parameters, gradients, optimizer state and their buffers
};

/// How the run was started last.
struct Header {
  using Texts = std::vector<std::pair<std::string, std::string>>;
  std::string id;       ///< of this start; empty: not said
  std::string started;  ///< date and time in UTC, as 2026-01-31T12:00:00Z
  Texts settings;       ///< by name, in the order of --help
  std::vector<std::string> given;
  Texts environment;
  std::int64_t ranks = 0;       ///< 0: not said
  std::int64_t parameters = 0;  ///< 0: not said
  std::string program;
  BytesByTag plan{};  ///< 0: not planned
  std::string trace;  ///< a file; empty: none

  /// @return "" if there is no such setting
  std::string setting(std::string_view name) const;
};

/// The trace that a start of a run was to write.
struct TraceFile {
  std::string file;
  std::string run_id;      ///< of the start; empty: not said
  std::int64_t ranks = 0;  ///< 0: not said
};

struct Run {
  std::string name;
  std::filesystem::path folder;
  Header header;
  std::vector<TraceFile> traces;      ///< of all starts, the last first
  std::vector<Iteration> iterations;  ///< ascending, each once
  std::vector<Evaluation> evaluations;
  std::vector<JumpRow> jumps;    ///< ascending
  std::vector<Sample> samples;   ///< ascending
  std::vector<Memory> memory;    ///< by rank, as last told
  std::int64_t most_memory = 0;  ///< bytes; largest of the ranks in all starts; 0: not told
  std::string stopped;           ///< why; empty: killed, or still running
  std::int64_t starts = 0;       ///< of this run, resumptions among them
  std::int64_t earlier = 0;      ///< other runs in the same file
  std::int64_t unread = 0;       ///< lines that are no objects of a log: torn, or not ours
};

/// Reads a log. Of lines about the same iteration the last counts, for a run that was killed repeats some when it is
/// resumed. A start from scratch begins another run; the run of the last start counts. A start that resumes belongs to
/// the run that has saved its checkpoint.
Run read_log(std::istream& lines);

/// Reads the log in an out_dir.
/// @throws fsdp::ConfigError if there is none, or nothing in it
Run read_run(std::filesystem::path const& folder);

}  // namespace transformer::report
