// SPDX-License-Identifier: Apache-2.0
// Lines of OUT/log.jsonl, one JSON object each: settings, losses and events of a run. `report` draws them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/memory.hpp"
#include "transformer/report/jump_watch.hpp"
#include "transformer/report/log_file.hpp"
#include "transformer/report/metrics.hpp"

namespace transformer {

/// Bytes by what they are for: what a rank has reserved, by its account, and the most that was in use at once of
/// parameters, gradients, optimizer state and their buffers.
struct RankMemory {
  std::array<std::int64_t, static_cast<std::size_t>(fsdp::MemoryTag::count_)> reserved{};
  std::int64_t peak_state = 0;
};
RankMemory rank_memory(fsdp::MemoryAccount const& account);
/// Between ranks, as a text.
std::string pack(RankMemory const& memory);

/// The first line of a start: settings, model, ranks and plan.
struct RunHeader {
  std::int64_t iteration = 0;  ///< the first
  bool resumed = false;
  std::string from;  ///< id of the start that has saved the checkpoint; empty: not known
  struct SettingText {
    std::string_view name;
    std::string value;
    bool given = false;  ///< by a config file or the command line
  };
  std::vector<SettingText> settings;
  std::vector<std::pair<std::string, std::string>> environment;  ///< name and text, in the order of their importance
  int ranks = 1;
  std::vector<std::pair<std::string, std::int64_t>> model;     ///< its shape: names and numbers
  std::string program;                                         ///< a step, as fsdp::to_text prints it
  std::vector<std::pair<fsdp::MemoryTag, std::int64_t>> plan;  ///< bytes per rank that the library has planned
  std::filesystem::path trace;                                 ///< empty: none
};

/// Names this start of a run among all others, in its log and in its trace: a report draws no other run's.
std::string const& run_id();
/// Whether the last start in a log began a new run, other than the run that the start `id` belongs to.
/// @return false if `id` is empty, or the log cannot be read
bool was_abandoned(std::filesystem::path const& log, std::string_view id);
/// A Chrome trace that says at its beginning which start of a run it is of.
std::string with_run_id(std::string trace);

/// Objects for LogFile::write, each with its `kind`: run, iter, eval, jump, skipped, sample, save, save_failed, memory,
/// stop.
std::string log_line(RunHeader const& header);
/// @param report  its mfu is this iteration's own
std::string log_line(IterationReport const& report);
std::string log_line(EvaluationReport const& report);
/// @param what  "loss" or "grad_norm"
std::string log_line(Jump const& jump, std::string_view what);
/// The iteration's gradient norm was not finite: the optimizer changed nothing.
std::string log_line_of_skipped_step(std::int64_t iteration);
/// @param what  "checkpoint" or "weights"
std::string log_line_of_save(std::int64_t iteration, std::string_view what);
std::string log_line_of_failed_save(std::int64_t iteration, std::string_view what, std::string_view why);
/// @param text  that the model wrote before the iteration
std::string log_line_of_sample(std::int64_t iteration, std::string_view text);
/// @param ranks  what each rank has packed
std::string log_line_of_memory(std::int64_t iteration, std::vector<std::string> const& ranks);
std::string log_line_of_stop(std::int64_t iteration, std::string_view why);

/// The processor's name, as the system tells it.
std::string processor_name();

}  // namespace transformer
