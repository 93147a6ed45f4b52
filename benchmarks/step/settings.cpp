// SPDX-License-Identifier: Apache-2.0
// The command line of the step benchmark.
#include "settings.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <string_view>
#include <vector>

namespace bench {

namespace {

/// The four sizes of GPT-2 (Radford et al., 2019), and the sequences that a micro-step has on a large GPU.
struct Model {
  std::string_view name;
  std::int64_t n_layer, n_head, n_embd, batch;
};
constexpr std::array<Model, 4> models{{{"gpt2", 12, 12, 768, 64},
                                       {"gpt2-medium", 24, 16, 1024, 32},
                                       {"gpt2-large", 36, 20, 1280, 16},
                                       {"gpt2-xl", 48, 25, 1600, 16}}};

void require(bool holds, std::string const& message) {
  if (!holds) throw CLI::ValidationError(message);
}

}  // namespace

int parse(int argc, char** argv, bool cuda, StepSettings& s) {
  CLI::App app(
      "Times training steps of a GPT on one rank: forward, backward, gradient norm, AdamW, on random tokens.\n"
      "With --kernels: memory-bound kernels and attention, each with a cold cache.");
  std::vector<std::string> names;
  for (auto const& model : models) names.emplace_back(model.name);
  auto const count = [&](std::string const& flag, std::int64_t& value, std::string const& description,
                         std::int64_t least, std::int64_t most) {
    app.add_option(flag, value, description)->check(CLI::Range(least, most))->capture_default_str();
  };
  app.add_option("--model", s.model, "model that sets layers, heads and width")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  count("--n_layer", s.n_layer, "number of layers (0: the model's)", 0, 10'000);
  count("--n_head", s.n_head, "number of heads (0: the model's)", 0, 10'000);
  count("--n_embd", s.n_embd, "width (0: the model's)", 0, 1'000'000);
  count("--vocab_size", s.vocab_size, "tokens of the vocabulary", 1, 100'000'000);
  count("--batch", s.batch, "sequences per micro-step (0: depends on the model on CUDA, 1 on the host)", 0, 1'000'000);
  count("--block", s.block, "tokens per sequence", 1, 1'000'000);
  count("--accumulate", s.accumulate, "micro-steps per optimizer step", 1, 1'000'000);
  s.dtype = cuda ? "bfloat16" : "float32";
  app.add_option("--dtype", s.dtype, "element type of parameters and activations in forward and backward")
      ->check(CLI::IsMember({"bfloat16", "float32"}))
      ->capture_default_str();
  count("--burn_in", s.burn_in, "warm-up steps", 0, 1'000'000);
  count("--timed", s.timed, "timed steps", 1, 1'000'000);
  count("--profiled", s.profiled, "steps measured for the table of kernel classes (0: no table)", 0, 1000);
  app.add_option("--clip", s.clip, "largest gradient norm (0: no clipping)")
      ->check(CLI::Range(0.0, 1e30))
      ->capture_default_str();
  app.add_option("--peak", s.peak_tflops,
                 "reference of MFU in TFLOP/s (0: the data sheet's rate if known, else the measured one)")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  count("--gemm_size", s.gemm_size,
        "size of the matrix product that measures the peak rate (0: 8192 on CUDA, 1024 on the host)", 0, 65536);
  count("--cache_kib", s.cache_kib,
        "size of the last-level cache; working sets are four times as large (0: ask the device)", 0,
        std::int64_t{1} << 30);
  count("--repeats", s.repeats,
        "repetitions of a peak rate's or a single kernel's measurement; the result is their median", 1, 100'000);
  app.add_flag("--kernels", s.kernels, "measure single kernels instead of a step");
  app.add_option("--json", s.json, "also write the figures to this file, one line of JSON");
  app.add_option(
      "--hardware", s.hardware,
      "also write flops, efficiency and memory_bandwidth to this file for nanogpt plan; its other lines stay");
  try {
    app.parse(argc, argv);
    for (auto const& model : models) {
      if (s.model != model.name) continue;
      if (s.n_layer == 0) s.n_layer = model.n_layer;
      if (s.n_head == 0) s.n_head = model.n_head;
      if (s.n_embd == 0) s.n_embd = model.n_embd;
      if (s.batch == 0) s.batch = cuda ? model.batch : 1;
    }
    require(s.n_embd % s.n_head == 0,
            fmt::format("--n_embd={}: expected a multiple of the {} heads", s.n_embd, s.n_head));
    if (s.gemm_size == 0) s.gemm_size = cuda ? 8192 : 1024;
  } catch (CLI::CallForHelp const&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (CLI::ParseError const& error) {
    fmt::print(stderr, "bench_step: {}\n(--help lists the flags)\n", error.what());
    return 2;
  }
  return -1;
}

}  // namespace bench
