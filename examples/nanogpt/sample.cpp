// SPDX-License-Identifier: Apache-2.0
// nanogpt sample: lets a trained model continue a text.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "commands.hpp"
#include "fsdp/comm/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"
#include "gpt.hpp"
#include "gpt2/open_model.hpp"
#include "launcher.hpp"
#include "layers_host.hpp"
#include "weights_file.hpp"

namespace nanogpt {
namespace {

using World = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<World>;

std::string start_text(std::string const& start) {
  if (!start.starts_with("FILE:")) return start;
  std::ifstream stream(start.substr(5), std::ios::binary);
  std::string const text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) fsdp::fail<fsdp::ConfigError>("setting 'start': the file '{}' cannot be read", start.substr(5));
  if (text.empty()) fsdp::fail<fsdp::ConfigError>("setting 'start': the file '{}' is empty", start.substr(5));
  return text;
}

/// Draws the next token: logits over the temperature, all but the top_k dropped, softmax.
std::int32_t draw(std::vector<float> const& logits, double temperature, std::int64_t top_k, std::mt19937_64& random) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  auto const kept = static_cast<std::ptrdiff_t>(std::min(static_cast<std::size_t>(top_k), order.size()));
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), [&](std::int32_t a, std::int32_t b) {
    auto const x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  });
  order.resize(static_cast<std::size_t>(kept));
  double const highest = logits[static_cast<std::size_t>(order.front())];
  std::vector<double> weights;
  for (auto const id : order)
    weights.push_back(std::exp((static_cast<double>(logits[static_cast<std::size_t>(id)]) - highest) / temperature));
  double const total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double left = static_cast<double>(random() >> 11) * 0x1p-53 * total;
  for (std::size_t i = 0; i < order.size(); ++i) {
    left -= weights[i];
    if (left < 0) return order[i];
  }
  return order.back();
}

/// One sample. When the text has outgrown the block size, the model reads the last block_size / 2 tokens again and goes
/// on from there, so that its cache serves most steps.
/// @param vocabulary  tokens that have a text: the model may have more, which are not drawn
std::vector<std::int64_t> continue_text(Gpt<Engine>& model, std::vector<std::int64_t> text, Settings const& s,
                                        std::int64_t vocabulary, std::mt19937_64& random) {
  std::vector<std::int32_t> fresh;
  auto const read_again = [&](std::int64_t count) {
    model.restart();
    auto const from = std::max<std::int64_t>(0, static_cast<std::int64_t>(text.size()) - count);
    fresh.assign(text.begin() + from, text.end());
  };
  read_again(model.capacity());
  for (std::int64_t token = 0; token < s.max_new_tokens; ++token) {
    if (model.cached() + static_cast<std::int64_t>(fresh.size()) > model.capacity())
      read_again(std::max<std::int64_t>(1, model.capacity() / 2));
    auto logits = model.extend(fresh.data(), static_cast<std::int64_t>(fresh.size()));
    logits.resize(static_cast<std::size_t>(vocabulary));
    auto const next = draw(logits, s.temperature, s.top_k, random);
    text.push_back(next);
    fresh.assign(1, next);
  }
  return text;
}

void sample_rank(World world, Settings const& settings, WeightsSource const& weights, Tokenizer const& tokenizer,
                 std::vector<std::int64_t> const& start) {
  fsdp::Mesh<World> mesh(std::move(world));
  Engine engine(mesh, fsdp::NoShard{});
  GptOptions options;
  options.training = false;
  auto const& config = weights.config();
  Gpt<Engine> model(engine, config, 1, config.block_size, options);
  load_weights(engine, weights);
  std::mt19937_64 random(static_cast<std::uint64_t>(settings.seed));
  for (std::int64_t sample = 0; sample < settings.num_samples; ++sample) {
    auto const text = continue_text(model, start, settings, tokenizer.size(), random);
    fmt::print("{}\n---------------\n", tokenizer.decode(text));
    std::fflush(stdout);
  }
}

}  // namespace

int run_sample(Settings const& settings) {
  check_together(settings, Command::sample, 1);
  auto const opened = open_model(settings);
  auto const tokenizer = open_tokenizer(opened, settings);
  if (tokenizer == nullptr)
    fsdp::fail<fsdp::ConfigError>(
        "'{}': there is no vocabulary beside the weights (vocab.json and merges.txt, or a meta.json with 'itos' or "
        "'tokenizer'), so there are no characters to print: --encoder_json=FILE and --vocab_bpe=FILE name GPT-2's",
        opened.weights->path().string());
  auto const start = tokenizer->encode(start_text(settings.start), Marker::token);
  if (settings.device == "cuda")
    fsdp::fail<fsdp::ConfigError>("setting 'device': sample computes on cpu in this version, got cuda");
  divide_cores(1);
  fsdp::local::run(1, fsdp::host::Device{},
                   [&](World world) { sample_rank(std::move(world), settings, *opened.weights, *tokenizer, start); });
  return 0;
}

}  // namespace nanogpt
