// SPDX-License-Identifier: Apache-2.0
// One rank of `train`, `bench` or `sample`: declared here, instantiated in rank_host.cpp and rank_cuda.cu of each
// model.
#pragma once

#include <string>

#include "fsdp/concepts.hpp"
#include "fsdp/tensor.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

/// The command and settings of a run, equal on all ranks.
struct Job {
  Settings settings;
  Command command = Command::train;
  std::string device;          ///< "cpu" or "cuda"
  std::string dtype;           ///< "float32" or "bfloat16": what the run computes in. "fastest": not known yet
  std::string dtype_note;      ///< why it is that one, where the settings alone do not say so, or empty
  std::string world_kind;      ///< how ranks came about, in words
  int threads = 1;             ///< that this rank computes with, on the host
  bool shares_gpus = false;    ///< there are fewer GPUs than processes
  bool says_refusals = false;  ///< rank 0 is elsewhere, and what it prints may be too: see refuse()
};

/// Before the ranks know each other: takes the settings of the run that `command` is to resume.
/// @return the type that the run computes in; empty if there is no run, or if it cannot be read
std::string take_settings_of_run(Settings& settings, Command command);

/// Runs one rank to its end. Each program defines it.
/// @tparam P  the precision that the job's dtype names
/// @return the exit code: not 0 if the ranks agreed before they began that they cannot; rank 0 has then said why
/// @note Collective: yes.
template <class P, fsdp::Communicator C>
int run_rank(C world, Job const& job);

}  // namespace transformer
