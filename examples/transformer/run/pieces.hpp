// SPDX-License-Identifier: Apache-2.0
// `bench --pieces` runs steps on request, so that two trainers can take turns on the same cores.
#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "transformer/launch/exit.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/math/blas.hpp"
#include "transformer/report/metrics.hpp"

namespace transformer {

// [Note: Pieces]
// A piece is some steps without a break. Rank 0 prints one line of JSON when it is ready, `{"kind":"ready",...}`; for
// each line of standard input, a number of steps, the ranks take them and rank 0 answers `{"kind":"piece",...}` with
// the seconds from the moment at which all ranks knew of it until all had done it. Other lines of output are no part of
// this. Between pieces nothing computes: the program may be stopped (SIGSTOP) and continued then, for less than
// collective_timeout. benchmarks/peers/compare.py speaks it with any number of trainers.

/// The steps that a line asks for. @return nothing unless it is a number above 0
inline std::optional<std::int64_t> steps_of_piece(std::string_view line) {
  std::int64_t steps = 0;
  auto const [end, error] = std::from_chars(line.data(), line.data() + line.size(), steps);
  if (error != std::errc{} || end != line.data() + line.size() || steps < 1) return std::nullopt;
  return steps;
}

/// The next line of standard input, without its end. @return nothing at the end of input
/// @note SIGTERM ends the process.
inline std::optional<std::string> wait_for_line() {
  std::string line;
  while (true) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, 100) <= 0) {  // milliseconds
      if (fsdp::host::termination_requested()) std::_Exit(fsdp::host::wait_terminated_exit_code);
      continue;
    }
    char letter{};
    if (::read(STDIN_FILENO, &letter, 1) != 1) return std::nullopt;
    if (letter == '\n') return line;
    line += letter;
  }
}

/// Burns in, says that it is ready, and takes pieces until standard input ends.
/// @return the exit code: usage_error after a line that is no number of steps
/// @note Collective: yes.
template <class T>
int run_pieces(T& trainer, Job const& job, int ranks) {
  using Clock = std::chrono::steady_clock;
  auto const& s = job.settings;
  auto& engine = trainer.engine();
  bool const speaks = engine.rank() == 0;
  std::int64_t iteration = 0;
  double loss = 0;
  auto const take = [&](std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i, ++iteration)
      loss = trainer.step(iteration, s.learning_rate, i + 1 == steps).value_or(loss);
    loss = engine.mean_over_ranks({loss})[0];  // all ranks are done
  };
  auto const say = [&](std::string const& line) {
    if (speaks) fmt::print("{}\n", line);
    std::fflush(stdout);
  };

  take(s.burn_in);
  std::int64_t parameters = 0;
  for (auto const& tensor : fsdp::tensor_list(engine)) parameters += tensor.numel;
  auto const blas = job.device == "cpu" ? fmt::format("\"{}\"", blas_info().core) : std::string("null");
  say(fmt::format(
      R"({{"kind":"ready","ranks":{},"parameters":{},"tokens_per_step":{},"strategy":"{}","dtype":"{}","threads":{},"blas_core":{}}})",
      ranks, parameters, s.tokens_per_step(), engine.strategy().name, job.dtype, job.threads, blas));
  while (true) {
    auto const line = speaks ? wait_for_line() : std::nullopt;
    auto const order = engine.world().exchange(line ? "piece " + *line : "end", "the next piece").front();
    if (order == "end") return EXIT_SUCCESS;
    auto const text = std::string_view(order).substr(6);
    auto const steps = steps_of_piece(text);
    if (!steps) {
      if (speaks) report_error(fmt::format("--pieces: expected a line with a number of steps, got '{}'", text));
      return usage_error;
    }
    auto const begin = Clock::now();
    take(*steps);
    double const seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    say(fmt::format(R"({{"kind":"piece","steps":{},"seconds":{:.9g},"loss":{:.9g}}})", *steps, seconds, loss));
  }
}

}  // namespace transformer
