// SPDX-License-Identifier: Apache-2.0
// A Llama and its training against transformers and peft: losses of twenty steps, gradients of the first, texts; on 1,
// 2 and 4 ranks, under every strategy. make_golden.py computed what is expected.
//
// links: llama_layers_host
// full-run: [llama-grid]
// skip-sanitizers
// long
#include "tests/llama/golden.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/llama/golden_run.hpp"
#include "tests/support/all_pairs.hpp"

namespace {

using llama_golden::adapters;
using llama_golden::frozen;
using llama_golden::Outcome;
using llama_golden::Run;

/// Tolerances of a loss, and of a gradient relative to its norm.
constexpr double tolerance = 5e-6;

llama_golden::Losses const& losses_of(std::string_view shape, std::string_view kind) {
  for (auto const& losses : llama_golden::losses)
    if (losses.shape == shape && losses.kind == kind) return losses;
  FAIL("no losses of " << shape << ", " << kind);
  return llama_golden::losses[0];
}

/// The largest difference of two runs' losses; infinity if their numbers differ.
double loss_difference(std::vector<double> const& got, std::string_view shape, std::string_view kind) {
  auto const& expected = losses_of(shape, kind).values;
  if (got.size() != expected.size()) return HUGE_VAL;
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const difference = std::abs(got[i] - expected[i]);
    largest = difference <= largest ? largest : difference;  // NaN gets through
  }
  return largest;
}

/// The gradients of all tensors that train, and of no others.
void check_gradients(Outcome const& outcome, std::string_view shape, std::string_view kind) {
  std::size_t compared = 0;
  for (auto const& row : llama_golden::rows) {
    if (row.shape != shape || row.kind != kind) continue;
    CAPTURE(row.tensor);
    std::string const tensor(row.tensor);
    REQUIRE(outcome.gradients.contains(tensor));
    auto const print = golden::fingerprint(tensor, outcome.gradients.at(tensor));
    CHECK(std::abs(print.norm - row.print.norm) <= tolerance * row.print.norm);
    CHECK(golden::distance(print, row.print) <= tolerance * row.print.norm);
    ++compared;
  }
  CHECK(compared == outcome.gradients.size());
}

void check(Run const& run, std::string_view kind) {
  CAPTURE(run.shape, kind, run.strategy.name, run.strategy.group, run.ranks, run.recompute, run.segment,
          run.unit_layers);
  auto const outcome = llama_golden::train(run);
  double const difference = loss_difference(outcome.losses, run.shape, kind);
  INFO("largest difference of the losses: " << difference);
  CHECK(difference <= tolerance);
  if (kind != "some_adapters") check_gradients(outcome, run.shape, kind);
  CHECK(outcome.losses.back() < outcome.losses.front());
  for (auto const& [name, values] : outcome.weights)
    CHECK((values == outcome.initial.at(name)) != outcome.gradients.contains(name));
}

/// Results of rank 0, with a model made for decoding, for a golden text's first tokens.
struct Continued {
  std::vector<std::int32_t> ids;
  std::int64_t capacity = 0;
  bool full = false;  ///< one token more is refused
};
Continued continued(llama_golden::Text const& text, int ranks, bool at_once) {
  Continued result;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](auto comm) {
    using Engine = typename llama_golden::Model<fsdp::Fp32>::Engine;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    auto const config = llama_golden::config_of(text.shape);
    llama::DecoderOptions options;
    options.training = false;
    llama::Llama<Engine> model(engine, config, 1, static_cast<std::int64_t>(text.ids.size()), options);
    llama_golden::begin(engine, config.hidden_size);
    Continued mine;
    mine.capacity = model.capacity();
    mine.ids.assign(text.ids.begin(), text.ids.begin() + llama_golden::prompt);
    std::vector<float> logits;
    if (at_once)
      logits = model.extend(mine.ids.data(), static_cast<std::int64_t>(mine.ids.size()));
    else
      for (auto const& id : mine.ids) logits = model.extend(&id, 1);
    while (mine.ids.size() < text.ids.size()) {
      mine.ids.push_back(static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      logits = model.extend(&mine.ids.back(), 1);
    }
    try {
      model.extend(mine.ids.data(), 1);
    } catch (fsdp::UsageError const&) {
      mine.full = true;
    }
    if (engine.rank() == 0) result = std::move(mine);
  });
  return result;
}

std::vector<fsdp::ShardingStrategy> strategies(int ranks) {
  std::vector<fsdp::ShardingStrategy> all{fsdp::FullShard{}, fsdp::ShardGradOp{}, fsdp::NoShard{}};
  all.emplace_back(fsdp::HybridShard<>{std::max(1, ranks / 2)});
  all.emplace_back(fsdp::HybridShard<fsdp::ShardGradOp>{std::max(1, ranks / 2)});
  return all;
}

}  // namespace

TEST_CASE("a Llama of any shape trains as in transformers", "[llama][golden]") {
  for (auto const shape : llama_golden::shapes) check({.shape = shape}, "full");
}

namespace {

constexpr std::array<std::string_view, 2> two_shapes{"grouped", "llama3"};  // tied, and not
constexpr std::array<int, 3> rank_counts{1, 2, 4};

/// Shapes, ranks, strategies.
fsdp::testing::Axes const strategy_axes{2, 3, 5};
void check_strategies(fsdp::testing::Table const& cells) {
  for (auto const& cell : cells) {
    int const ranks = rank_counts[cell[1]];
    check({.shape = two_shapes[cell[0]], .strategy = strategies(ranks)[cell[2]], .ranks = ranks}, "full");
  }
}

/// Shapes, ranks, whether layers are recomputed.
fsdp::testing::Axes const tuning_axes{2, 3, 2};
void check_tuning(fsdp::testing::Table const& cells, transformer::Tuning const& tuning, std::string_view kind) {
  for (auto const& cell : cells) {
    check({.shape = two_shapes[cell[0]],
           .ranks = rank_counts[cell[1]],
           .recompute = cell[2] == 0 ? 0 : 2,
           .tuning = tuning},
          kind);
  }
}

}  // namespace

TEST_CASE("a Llama trains as in transformers on any ranks, under every strategy", "[llama][golden]") {
  check_strategies(fsdp::testing::all_pairs(strategy_axes));
  check({.shape = "nine_three", .ranks = 2}, "full");
  check({.shape = "wide_heads", .ranks = 4}, "full");
}

TEST_CASE("a Llama trains as in transformers and peft in every combination", "[.][llama-grid]") {
  check_strategies(fsdp::testing::all_rows(strategy_axes));
  check_tuning(fsdp::testing::all_rows(tuning_axes), adapters(), "adapters");
  check_tuning(fsdp::testing::all_rows(tuning_axes), frozen(1), "frozen");
}

TEST_CASE("a Llama trains as in transformers where layers are recomputed or share units", "[llama][golden]") {
  for (auto const shape : two_shapes) {
    for (std::int64_t const recompute : {1, 2}) check({.shape = shape, .ranks = 2, .recompute = recompute}, "full");
    check({.shape = shape, .ranks = 2, .recompute = 2, .segment = 2}, "full");
    for (std::int64_t const unit_layers : {0, 2})
      check({.shape = shape, .ranks = 2, .unit_layers = unit_layers}, "full");
  }
}

TEST_CASE("recomputed layers of a Llama change no bit, in fp32 and bf16", "[llama][segments]") {
  for (auto const& tuning : {transformer::Tuning{}, adapters(), frozen(1)}) {
    Run run{.shape = "llama3", .ranks = 2, .tuning = tuning, .steps = 3};
    auto const kept = llama_golden::train(run);
    auto const narrow = llama_golden::train<fsdp::Bf16>(run);
    CHECK(narrow.losses != kept.losses);
    run.recompute = 2;
    for (std::int64_t const segment : {1, 2}) {
      CAPTURE(tuning.lora_rank, tuning.frozen_layers, segment);
      run.segment = segment;
      CHECK((llama_golden::train(run) == kept));
      CHECK((llama_golden::train<fsdp::Bf16>(run) == narrow));
    }
  }
}

TEST_CASE("adapters of a Llama train as in peft", "[llama][golden]") {
  check_tuning(fsdp::testing::all_pairs(tuning_axes), adapters(), "adapters");
  for (auto const shape : two_shapes) {
    check({.shape = shape, .strategy = fsdp::NoShard{}, .ranks = 2, .tuning = adapters()}, "adapters");
    check({.shape = shape, .ranks = 2, .tuning = adapters({"q_proj", "v_proj", "up_proj"})}, "some_adapters");
  }
}

TEST_CASE("a Llama above frozen layers trains as in transformers", "[llama][golden]") {
  check_tuning(fsdp::testing::all_pairs(tuning_axes), frozen(1), "frozen");
  for (auto const shape : two_shapes) {
    check({.shape = shape, .strategy = fsdp::ShardGradOp{}, .ranks = 2, .tuning = frozen(1)}, "frozen");
  }
}

TEST_CASE("a Llama in bf16 is as near to fp32 as in transformers", "[llama][golden]") {
  for (auto const shape : two_shapes) {
    CAPTURE(shape);
    auto const& theirs = losses_of(shape, "bf16").values;
    auto const& exact = losses_of(shape, "untrained").values;
    double ours_squares = 0, their_squares = 0;
    llama_golden::Tensors gradients;
    Run const run{.shape = shape};
    fsdp::local::run(1, fsdp::host::Device{}, [&](auto comm) {
      llama_golden::Model<fsdp::Bf16> model(std::move(comm), run);
      for (std::size_t step = 0; step < llama_golden::steps; ++step) {
        ours_squares += std::pow(model.evaluate(step) - exact[step], 2);
        their_squares += std::pow(theirs[step] - exact[step], 2);
      }
      model.forward_backward(0);
      model.read_loss();
      fsdp::export_gradients(model.engine(), llama_golden::keep(gradients));
    });
    INFO("losses: ours " << std::sqrt(ours_squares / 20) << ", theirs " << std::sqrt(their_squares / 20));
    CHECK(std::sqrt(ours_squares) <= 1.5 * std::sqrt(their_squares));
    double ours = 0, other = 0;
    for (auto const& row : llama_golden::rows) {
      if (row.shape != shape || row.kind != "full") continue;
      auto const narrow =
          std::find_if(std::begin(llama_golden::rows), std::end(llama_golden::rows),
                       [&](auto const& r) { return r.shape == shape && r.kind == "bf16" && r.tensor == row.tensor; });
      REQUIRE(narrow != std::end(llama_golden::rows));
      std::string const tensor(row.tensor);
      auto const print = golden::fingerprint(tensor, gradients.at(tensor));
      ours += std::pow(golden::distance(print, row.print) / row.print.norm, 2);
      other += std::pow(golden::distance(narrow->print, row.print) / row.print.norm, 2);
    }
    INFO("gradients: ours " << std::sqrt(ours) << ", theirs " << std::sqrt(other));
    CHECK(std::sqrt(ours) <= 1.5 * std::sqrt(other));
    CHECK(ours > 0);
  }
}

TEST_CASE("a Llama continues a text as in transformers, given at once or token by token", "[llama][golden]") {
  for (auto const& text : llama_golden::texts) {
    std::vector<std::int32_t> const expected(text.ids.begin(), text.ids.end());
    for (int const ranks : {1, 2}) {
      for (bool const at_once : {true, false}) {
        CAPTURE(text.shape, ranks, at_once);
        auto const got = continued(text, ranks, at_once);
        CHECK(got.ids == expected);
        CHECK(got.capacity == static_cast<std::int64_t>(expected.size()));  // not max_position_embeddings
        CHECK(got.full);
      }
    }
  }
}
