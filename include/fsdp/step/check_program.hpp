// SPDX-License-Identifier: Apache-2.0
// Checks a compiled program: the input of every operation has the right content.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/step/facts.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/run.hpp"
#include "fsdp/step/step_input.hpp"
#include "fsdp/step/symbols.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {
/// Runs all kinds of micro-steps that the options allow: see check_program().
[[gnu::cold]] inline void run_all_kinds(step::BasicRun& run, step::Symbols& symbols, AllowedFlags const& allowed) {
  run.prepare();
  auto const last_micro_step = [&] {
    run.micro_step();
    run.norm();
    run.update();
    symbols.expect_updated();
  };
  for (std::size_t path = 1; path < run.program().paths(); ++path) {
    run.follow(path), last_micro_step();
    for (auto const flags : allowed) {
      run.follow(path), run.micro_step(flags), last_micro_step();
      run.frozen_micro_step(flags.reshard);
      run.micro_step(flags), run.follow(0), last_micro_step();
      run.micro_step(flags), run.follow(path), run.micro_step(), run.follow(0), last_micro_step();
      run.follow(path), run.evaluation();
      run.micro_step(flags), run.discard();
    }
  }
  run.follow(0);
  for (auto const flags : allowed) {
    for (int micro_steps = 1; micro_steps <= 2; ++micro_steps) {
      for (int i = 0; i < micro_steps; ++i) run.micro_step(flags);
      run.frozen_micro_step(flags.reshard);
      last_micro_step();
    }
    run.evaluation();
    run.micro_step(flags);
    run.discard();
  }
}
}  // namespace detail

/// Runs a program in symbols: all kinds of micro-steps that its options allow, each before and after plain ones, with
/// norms, updates, evaluations and discarded gradients; and so each path, alone and in turn with the declared order.
/// Engines call it when they are sealed, if FSDP_CHECK_PROGRAM is defined.
/// @param input  of compile_program()
/// @return the first problem: step, use, unit, what was expected and what was found; empty if there is none
[[gnu::cold]] inline std::string check_program(Program const& program, StepInput const& input) {
  std::vector<bool> padded;
  for (auto const& unit : input.units) padded.push_back(unit.padded);
  step::Symbols symbols(program, std::move(padded));
  step::Run run(program, [&](step::Operation const& operation, step::Position const& at,
                             step::Contents const& contents) { symbols.run(executed(operation, at, contents)); });
  std::string refused;  // the run goes no further, because of a problem that symbols have found, or do not know
  try {
    detail::run_all_kinds(run, symbols, AllowedFlags(program, input));
  } catch (Error const& error) {
    refused = error.what();
  }
  return symbols.problems().empty() ? refused : symbols.problems().front();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
