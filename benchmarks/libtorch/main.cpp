// SPDX-License-Identifier: Apache-2.0
// A GPT of torch::nn modules, sharded by fsdp, some steps at a time. It takes the arguments of `nanogpt bench` and
// speaks its protocol (examples/transformer/run/pieces.hpp), so that benchmarks/peers/compare.py compares it with PyTorch's DDP
// and FSDP2:
//
//   python3 benchmarks/peers/compare.py --ours=build/cpu/benchmarks/libtorch/bench_libtorch --model=char
//   --pairing=sharded
//   --peers=eager
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/libtorch.hpp"
#include "fsdp/mpi.hpp"
#include "gpt.hpp"

namespace {

struct Arguments {
  bench::Sizes sizes;
  std::int64_t batch = 12;
  std::string strategy = "full_shard", dataset = "peers";
  int burn_in = 3, prefetch = 1;
  double timeout = 600;  // seconds
};

void read(Arguments& to, CLI::App& app) {
  app.add_option("--n_layer", to.sizes.layers);
  app.add_option("--n_head", to.sizes.heads);
  app.add_option("--n_embd", to.sizes.width);
  app.add_option("--block_size", to.sizes.length);
  app.add_option("--batch_size", to.batch, "sequences of a rank");
  app.add_option("--strategy", to.strategy)->check(CLI::IsMember({"full_shard", "shard_grad_op", "no_shard"}));
  app.add_option("--dataset", to.dataset, "reads data/<dataset>/train.bin, of uint16, and meta.json");
  app.add_option("--burn_in", to.burn_in, "steps before the first piece");
  app.add_option("--prefetch", to.prefetch);
  app.add_option("--collective_timeout", to.timeout, "seconds");
  app.set_version_flag("--version", "bench_libtorch, torch " TORCH_VERSION);
  app.allow_extras();  // other settings of nanogpt bench
}

/// Windows of the data set at random, others on each rank.
class Batches {
 public:
  Batches(std::string const& dataset, std::int64_t batch, std::int64_t block, int rank)
      : batch_(batch), block_(block), generator_(at::make_generator<at::CPUGeneratorImpl>(1337 + rank)) {
    auto const file = "data/" + dataset + "/train.bin";
    std::FILE* const in = std::fopen(file.c_str(), "rb");
    if (in == nullptr) throw fsdp::ConfigError("cannot read " + file);
    std::vector<std::uint16_t> ids(1 << 16);
    for (std::size_t got = 0; (got = std::fread(ids.data(), 2, ids.size(), in)) > 0;)
      tokens_.insert(tokens_.end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(got));
    std::fclose(in);
  }
  std::pair<at::Tensor, at::Tensor> draw() {
    auto const last = static_cast<std::int64_t>(tokens_.size()) - block_;
    auto const starts = torch::randint(last, {batch_}, generator_, torch::kLong);
    auto const rows = torch::empty({batch_, block_ + 1}, torch::kLong);
    for (std::int64_t row = 0; row < batch_; ++row)
      std::copy_n(tokens_.begin() + starts[row].item<std::int64_t>(), block_ + 1,
                  rows.data_ptr<std::int64_t>() + row * (block_ + 1));
    return {rows.slice(1, 0, block_).contiguous(), rows.slice(1, 1).contiguous()};
  }

 private:
  std::vector<std::uint16_t> tokens_;
  std::int64_t batch_, block_;
  at::Generator generator_;
};

std::int64_t vocabulary_of(std::string const& dataset) {
  std::FILE* const in = std::fopen(("data/" + dataset + "/meta.json").c_str(), "rb");
  long long value = 0;
  if (in == nullptr || std::fscanf(in, "{\"vocab_size\": %lld", &value) != 1)
    throw fsdp::ConfigError("data/" + dataset + "/meta.json does not begin with a vocab_size");
  std::fclose(in);
  return value;
}

int run(fsdp::mpi::Environment& environment, Arguments args) {
  using Clock = std::chrono::steady_clock;
  args.sizes.vocabulary = vocabulary_of(args.dataset);
  fsdp::mpi::Options options;
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * args.timeout));
  fsdp::Mesh mesh{fsdp::mpi::Communicator{environment, {}, options}};
  auto compute = fsdp::host::Stream::inline_stream("compute");
  fsdp::ShardingStrategy const strategy = args.strategy == "no_shard" ? fsdp::ShardingStrategy(fsdp::NoShard{})
                                          : args.strategy == "shard_grad_op"
                                              ? fsdp::ShardingStrategy(fsdp::ShardGradOp{})
                                              : fsdp::ShardingStrategy(fsdp::FullShard{});
  fsdp::Engine engine{mesh, strategy, {.prefetch = args.prefetch}, compute};
  fsdp::libtorch::Sharder sharder{engine};

  torch::manual_seed(1337);
  bench::Embed const table(args.sizes);
  auto embed = sharder.shard(table, "embed");
  std::vector<fsdp::libtorch::Sharded<bench::LayerImpl>> layers;
  for (std::int64_t i = 0; i < args.sizes.layers; ++i)
    layers.push_back(sharder.shard(bench::Layer(args.sizes), "layers." + std::to_string(i)));
  auto norm = sharder.shard(bench::Norm(args.sizes.width), "norm");
  auto head = sharder.share(embed, bench::Head(table.ptr()), "head");
  fsdp::AdamW adamw{engine,
                    {.lr = 6e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .weight_decay = 0.1f},
                    {{.tensors = "*norm*", .weight_decay = 0.0f}}};

  Batches batches(args.dataset, args.batch, args.sizes.length, engine.rank());
  at::Tensor loss;
  auto const step = [&] {
    auto const [ids, targets] = batches.draw();
    auto x = embed(ids);
    for (auto& layer : layers) x = layer(x);
    auto const now = torch::nn::functional::cross_entropy(head(norm(x)).flatten(0, 1), targets.flatten());
    now.backward();
    adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
    loss = now.detach();
  };
  auto const take = [&](long long steps) {
    for (long long i = 0; i < steps; ++i) step();
    return engine.mean_over_ranks({loss.item<double>()})[0];  // all ranks are done
  };

  take(args.burn_in);
  bool const speaks = engine.rank() == 0;
  std::int64_t parameters = 0;
  for (auto const& tensor : fsdp::tensor_list(engine)) parameters += tensor.numel;
  if (speaks)
    std::printf(
        R"({"kind":"ready","ranks":%d,"parameters":%lld,"tokens_per_step":%lld,"strategy":"%s","dtype":"float32","threads":%d})"
        "\n",
        engine.world_size(), static_cast<long long>(parameters),
        static_cast<long long>(engine.world_size() * args.batch * args.sizes.length), args.strategy.c_str(),
        at::get_num_threads());
  std::fflush(stdout);
  while (true) {
    std::string line;
    if (speaks && !std::getline(std::cin, line)) line = "end";
    auto const order = engine.world().exchange(line, "the next piece").front();
    if (order == "end") return 0;
    auto const steps = std::stoll(order);
    auto const begin = Clock::now();
    auto const mean = take(steps);
    std::chrono::duration<double> const seconds = Clock::now() - begin;
    if (speaks)
      std::printf(R"({"kind":"piece","steps":%lld,"seconds":%.9f,"loss":%.9f})"
                  "\n",
                  steps, seconds.count(), mean);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Arguments args;
  CLI::App app("trains a GPT of torch::nn modules, sharded, in pieces");
  read(args, app);
  app.add_option("mode", "bench")->expected(0, 1);
  CLI11_PARSE(app, argc, argv);
  return fsdp::mpi::run(argc, argv, [&](auto& environment) { return run(environment, args); });
}
