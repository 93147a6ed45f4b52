// SPDX-License-Identifier: Apache-2.0
// One rank of `sample`.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/launch/refusals.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/sampling/continuation.hpp"
#include "transformer/sampling/next_token.hpp"
#include "transformer/sampling/request.hpp"
#include "transformer/training/engine_options.hpp"

namespace transformer {

/// [Note: Samples of several ranks]
/// Rank 0 draws and prints, and tells the others each token; they hold parts of the parameters, and compute the same
/// passes so that their collectives meet. So every rank has the same text by construction, be its arithmetic as it may:
/// rank 0's text follows from its own passes. Gathered parameters have the same bits on any number of ranks and with
/// any strategy, so have these passes, and so the text.
///
/// @tparam E  engine of the ranks, which holds the model's weights
/// @tparam M  model on that engine
template <class E, class M>
class Sampler {
 public:
  Sampler(E& engine, M& model, SampleText const& request, Settings const& settings)
      : engine_(engine),
        model_(model),
        request_(request),
        settings_(settings),
        random_(static_cast<std::uint64_t>(settings.seed)),
        printer_(*request.tokenizer) {}

  /// Draws and prints all samples; ends early if nobody reads them.
  /// @throws fsdp::Error on rank 0 if no token can be drawn or printed
  /// @note Collective: yes.
  void run() {
    for (std::int64_t sample = 0; sample < settings_.num_samples && !stopped_; ++sample) {
      if (engine_.rank() == 0) {
        auto const begin = request_.tokenizer->text_template().before;
        for (auto const id : request_.start)
          if (std::find(begin.begin(), begin.end(), id) == begin.end()) printer_.add(id);
      }
      continue_text(model_, request_.start, settings_.max_new_tokens,
                    [&](std::vector<float> const& logits) { return next(logits); });
      if (engine_.rank() == 0) printer_.end_sample();
    }
  }

 private:
  /// Says instead of a token that nobody reads any more.
  static constexpr std::int64_t nobody_reads = -1;

  /// @return nullopt where the sample ends: the same on every rank
  std::optional<std::int32_t> next(std::vector<float> const& logits) {
    if (fsdp::host::termination_requested()) std::_Exit(fsdp::host::wait_terminated_exit_code);
    auto const token = told_by_first(engine_.rank() == 0 ? draw_and_print(logits) : 0);
    if (token == nobody_reads) stopped_ = true;
    if (stopped_ || ends(token)) return std::nullopt;
    return static_cast<std::int32_t>(token);
  }
  std::int64_t draw_and_print(std::vector<float> const& logits) {
    DrawOptions const options{settings_.temperature, settings_.top_k, settings_.top_p};
    auto const known = std::min(logits.size(), static_cast<std::size_t>(request_.tokenizer->size()));
    std::int64_t const token = draw_token(std::span(logits).first(known), options, random_);
    if (!ends(token)) printer_.add(token);
    return printer_.closed() ? nobody_reads : token;
  }
  bool ends(std::int64_t token) const {
    auto const& ends = request_.ends;
    return settings_.stop_at_end &&
           (token == request_.tokenizer->end_of_text() || std::find(ends.begin(), ends.end(), token) != ends.end());
  }
  std::int64_t told_by_first(std::int64_t mine) {
    if (engine_.world_size() == 1) return mine;
    return std::stoll(engine_.world().exchange(fmt::format("{}", mine), "the next token").front());
  }

  E& engine_;
  M& model_;
  SampleText const& request_;
  Settings const& settings_;
  std::mt19937_64 random_;  // rank 0's
  SamplePrinter printer_;
  bool stopped_ = false;
};

/// Runs one rank of `sample` to its end: see run_rank.
/// @tparam Program  see [Note: What a program is]
template <class Program, class P, fsdp::Communicator C>
int sample_rank(C world, Job const& job) {
  auto const& settings = job.settings;
  int const rank = world.rank();
  SampleRequest<typename Program::Opened> request;
  try {
    agree(world, [&] { request = Program::sample_request(settings, world.size()); });
    agree(world, [&] { expect_same_settings(world, settings); });
    std::string model;
    agree(world, [&] { model = Program::fingerprint(request.model); });
    fsdp::detail::expect_equal_texts(world, model, "the model to sample from");
    fsdp::detail::expect_equal_texts(world, fmt::format("start of {}", fmt::join(request.text.start, " ")),
                                     "the text to continue");  // a file, which machines may have others of
  } catch (AgreedError const& error) {
    return refuse(rank, job, error.what());
  } catch (fsdp::ConfigError const& error) {  // of expect_equal_texts: every rank's. A lost peer ends the run elsewhere
    return refuse(rank, job, error.what());
  }
  if (rank == 0 && !request.note.empty()) fmt::print(stderr, "{}: {}\n", program_name, report::printable(request.note));

  using Engine = fsdp::Engine<C, P>;
  using Model = typename Program::template Model<Engine>;
  auto const& config = request.model.config;
  fsdp::Mesh<C> mesh(std::move(world));
  auto sharding = settings;
  sharding.reshard_after_forward.clear();  // a config file's: no backward follows
  Engine engine(mesh, strategy_of(sharding), engine_options(sharding));
  auto options = decoder_options<typename C::Device>();
  options.training = false;
  Model model(engine, config, 1, Program::longest_text(settings, config, request.text), options);
  engine.seal();
  try {
    agree(engine.world(), [&] { Program::load_weights(engine, request.model); });
  } catch (AgreedError const& error) {
    return refuse(rank, job, error.what());
  }
  Sampler<Engine, Model>(engine, model, request.text, settings).run();
  return EXIT_SUCCESS;
}

}  // namespace transformer
