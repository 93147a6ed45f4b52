// SPDX-License-Identifier: Apache-2.0
// Random models under every strategy and option, with segments, paths, and state in host memory: equal
// in every bit where docs/numerics.md promises it, and, unless values are rounded to bf16, within 1e-5 of a reference
// in double. Optimizers have collectives of their own now and then; Muon has no reference. A seed that fails prints a
// program that repeats it. --digests compares nothing: it prints digests, which are the same for two states of the
// library that compute the same.
//
// links: fsdp_test_trial
// full-run: --seeds=2000
// timeout: 1800
// skip-sanitizers
// long
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/seeds.hpp"
#include "tests/support/trial/compare.hpp"
#include "tests/support/trial/draw.hpp"
#include "tests/support/trial/text.hpp"

namespace {

struct Case {
  trial::Trial trial;
  std::vector<trial::Setting> settings;
};

/// FullShard by default, and three settings at random; sometimes all three with gradients that travel in bf16, each now
/// and then with segments. One of the four settings comes twice, once with segments.
Case draw_case(std::uint64_t seed) {
  trial::Draw draw(seed);
  Case drawn{trial::draw_trial(draw, {.freezes = true, .narrow = true, .paths = true, .communicates = true}),
             std::vector<trial::Setting>(1)};
  auto const needs = trial::needs_of(drawn.trial.script);
  drawn.settings[0].options.allow_no_sync = needs.unsynced;
  drawn.settings[0].options.allow_frozen_parameters = needs.activations;
  bool const rounds = draw.once_in(4);
  for (int i = 0; i < 3; ++i) {
    drawn.settings.push_back(trial::draw_setting(draw, drawn.trial));
    if (rounds) drawn.settings.back().options.reduce_dtype = fsdp::DType::bf16;
  }
  for (std::size_t s = 1; s < drawn.settings.size(); ++s)
    if (draw.once_in(2)) drawn.settings[s].segments = trial::draw_segments(draw, drawn.trial.model);
  auto twice = draw.of(drawn.settings);
  if (twice.segments.empty())
    twice.segments = trial::draw_segments(draw, drawn.trial.model);
  else
    twice.segments.clear();
  drawn.settings.push_back(std::move(twice));
  return drawn;
}

std::string difference(Case const& of, int* compared = nullptr) {
  try {
    return trial::compare(of.trial, of.settings, compared);
  } catch (std::exception const& error) {
    return error.what();
  }
}

/// The digests of all settings, to compare two states of the library on one machine.
std::string digests_of(Case const& of) {
  trial::Digests digests;
  for (auto const& setting : of.settings) digests.add(trial::run_setting(of.trial, setting, true));
  return fmt::format("results {:016x}, programs {:016x}", digests.results, digests.programs);
}

/// Without the settings and the steps at the end that the difference does not need.
Case shrunk(Case from) {
  for (std::size_t s = from.settings.size(); s-- > 0 && from.settings.size() > 1;) {
    Case less = from;
    less.settings.erase(less.settings.begin() + static_cast<std::ptrdiff_t>(s));
    if (!difference(less).empty()) from = std::move(less);
  }
  for (std::size_t ops = 1; ops < from.trial.script.size(); ++ops) {
    Case less = from;
    less.trial.script.resize(ops);
    auto const last = less.trial.script.back().kind;
    if ((last == trial::Op::step || last == trial::Op::gradients) && !difference(less).empty()) return less;
  }
  return from;
}

}  // namespace

int main(int argc, char** argv) {
  fsdp::testing::Seeds seeds{.count = 60};
  bool digests = false;
  for (int i = 1; i < argc; ++i) {
    std::string const option = argv[i];
    auto const value = std::strtoull(option.c_str() + std::min(option.size(), option.find('=') + 1), nullptr, 10);
    if (option.starts_with("--seeds=")) {
      seeds.count = value;
    } else if (option.starts_with("--seed=")) {
      seeds.first = value, seeds.count = 1;
    } else if (option.starts_with("--print=")) {
      auto const of = draw_case(value);
      std::fputs(trial::program(of.trial, of.settings).c_str(), stdout);
      return 0;
    } else if (option == "--digests") {
      digests = true;
    } else {
      fmt::print(stderr, "usage: {} [--seeds=N] [--seed=S] [--print=S] [--digests]\n", argv[0]);
      return 2;
    }
  }
  auto const tell = [](std::uint64_t seed, std::string const& text) { fmt::print("seed {}: {}\n", seed, text); };
  if (digests) {
    auto const print = [&](std::uint64_t seed) {
      tell(seed, digests_of(draw_case(seed)));
      return std::string();
    };
    return each_seed(seeds, print, tell) == 0 ? 0 : 1;
  }
  int compared = 0, programs = 0;
  auto const run = [&](std::uint64_t seed) {
    auto const of = draw_case(seed);
    auto text = difference(of, &compared);
    if (!text.empty() && programs++ == 0) {
      auto const small = shrunk(of);
      text += "\n// This program repeats it:\n" + trial::program(small.trial, small.settings);
    }
    return text;
  };
  auto const failed = each_seed(seeds, run, tell);
  fmt::print("{} of {} seeds failed\n", failed, seeds.count);
  return failed == 0 ? 0 : 1;
}
