// SPDX-License-Identifier: Apache-2.0
// Buffers of torch modules are equal on all ranks at the start and after sync_buffers, and a checkpoint has them once.
// ranks: 1
// needs: LibTorch
// skip-tsan
// skip-asan
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/libtorch.hpp"
#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using namespace networks;
using Test = Trainer<Comm>;
using fsdp::testing::has;

Network with_norm() {
  auto network = named("six layers");
  network.kinds[2] = "norm";
  return network;
}
std::string bits(Tensor const& tensor) {
  auto const values = tensor.detach().contiguous();
  return {static_cast<char const*>(values.data_ptr()), values.nbytes()};
}
template <class Engine>
bool same_on_all(Engine& engine, std::string const& mine) {
  for (auto const& text : engine.world().exchange(mine, "bits"))
    if (text != mine) return false;
  return true;
}
std::string all_bits(Test& test) {
  std::string all;
  for (auto const& unit : test.units)
    for (auto const& buffer : unit->buffers()) all += bits(buffer);
  return all;
}
/// Of the same rows on all ranks.
std::string evaluation(Test& test) {
  torch::NoGradGuard const no_grad;
  auto const scope = test.engine.evaluation();
  for (auto const& unit : test.units) unit->eval();
  auto const [x, y] = batch(test.network, 5, 0);
  auto const loss = test.network.loss(test.call, test.two, x, y);
  for (auto const& unit : test.units) unit->train();
  return bits(loss);
}
template <class Body>
void on_ranks(int ranks, Body const& body) {
  fsdp::local::run(ranks, fsdp::host::Device{},
                   [&](Comm comm) { body(Test(std::move(comm), with_norm(), fsdp::FullShard{}, {})); });
}

/// A linear map with buffers of several kinds.
struct BufferedImpl : torch::nn::Module {
  explicit BufferedImpl(double value = 0.0) {
    weight = register_parameter("weight", torch::ones({width, width}));
    table = register_buffer("table", torch::full({3, 2}, value).t());  // not contiguous
    wide = register_buffer("wide", torch::full({2}, value, at::kDouble));
    mask = register_buffer("mask", torch::full({2}, value != 0.0, at::kBool));
    nothing = register_buffer("nothing", Tensor());
  }
  Tensor forward(Tensor const& x) { return torch::matmul(x, weight); }
  Tensor weight, table, wide, mask, nothing;
};

}  // namespace

TEST_CASE("ranks begin with rank 0's buffers; after sync_buffers, buffers and evaluations are equal on all ranks") {
  for (int const ranks : {1, 2, 4})
    for (auto const how : {fsdp::BufferSync::average, fsdp::BufferSync::broadcast})
      on_ranks(ranks, [&](Test test) {
        auto& engine = test.engine;
        auto const& norm = test.units[2]->batch_norm;
        norm->running_mean.fill_(0.5 + engine.rank());
        auto const first = evaluation(test);
        RANK_CHECK(torch::equal(norm->running_mean, torch::full({width}, 0.5)));
        RANK_CHECK(same_on_all(engine, first));
        for (int step = 0; step < 2; ++step) {
          test.backward(step);
          test.step();
        }
        RANK_CHECK(same_on_all(engine, all_bits(test)) == (ranks == 1));
        RANK_CHECK(same_on_all(engine, evaluation(test)) == (ranks == 1));
        auto expected = torch::zeros({width}, at::kDouble);
        auto const means = engine.world().exchange(bits(norm->running_mean), "means");
        for (auto const& text : means)
          expected += torch::from_blob(const_cast<char*>(text.data()), {width}, at::kFloat);
        expected = (expected / ranks).to(at::kFloat);
        test.sharder.sync_buffers(how);
        RANK_CHECK(bits(norm->running_mean) == (how == fsdp::BufferSync::average ? bits(expected) : means[0]));
        RANK_CHECK(norm->num_batches_tracked.item<std::int64_t>() == 2);
        RANK_CHECK(same_on_all(engine, all_bits(test)));
        RANK_CHECK(same_on_all(engine, evaluation(test)));
      });
  CHECK_RANKS();
}

TEST_CASE("a checkpoint has the buffers once, and any number of ranks gets the same bits") {
  for (auto const& [from, to] : {std::pair(2, 4), std::pair(4, 2), std::pair(4, 1)}) {
    fsdp::testing::TemporaryFolder const folder;
    std::string saved;
    on_ranks(from, [&](Test test) {
      test.make_optimizer();
      test.backward(0);
      test.step();
      test.sharder.sync_buffers();
      fsdp::save(test.engine, *test.adamw, folder.path, {{"buffers", fsdp::libtorch::buffers(test.sharder)}});
      if (test.engine.rank() == 0) saved = all_bits(test);
    });
    on_ranks(to, [&](Test test) {
      test.make_optimizer();
      auto const loaded = fsdp::load_latest(test.engine, *test.adamw, folder.path);
      fsdp::libtorch::load_buffers(test.sharder, loaded->extra.at("buffers"));
      RANK_CHECK(all_bits(test) == saved);
      auto const loss = evaluation(test);
      RANK_CHECK(all_bits(test) == saved);
      RANK_CHECK(same_on_all(test.engine, loss));
    });
  }
  CHECK_RANKS();
}

TEST_CASE("buffers of every type and layout are synchronised; one that several uses have counts once") {
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    auto const rank = comm.rank();
    fsdp::Mesh mesh(std::move(comm));
    auto compute = fsdp::host::Stream::inline_stream("compute");
    fsdp::Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    fsdp::libtorch::Sharder sharder{engine};
    auto const module = std::make_shared<BufferedImpl>(rank == 0 ? 1.0 : 0.0);
    auto const unit = sharder.shard(module, "unit");
    auto const again = sharder.share(unit, module, "again");
    struct HeadImpl : torch::nn::Module {
      Tensor own = register_buffer("own", torch::zeros({1}));
      Tensor forward(Tensor const& x) { return x; }
    };
    auto const head = sharder.share(unit, std::make_shared<HeadImpl>(), "head");
    head->own.fill_(rank);
    auto const json = fsdp::libtorch::buffers(sharder);
    std::vector<std::string> names;
    for (auto const& item : json.items()) names.push_back(item.key());
    RANK_CHECK(names == std::vector<std::string>{"unit.table", "unit.wide", "unit.mask", "head.own"});

    // Autograd notices that a buffer which it has saved has changed.
    auto const factor = torch::ones({2}, at::kDouble).requires_grad_();
    auto const product = (factor * module->wide).sum();
    sharder.sync_buffers();
    RANK_CHECK(
        has(fsdp::testing::what<std::exception>([&] { product.backward(); }), "modified by an inplace operation"));
    RANK_CHECK(torch::equal(module->table, torch::full({2, 3}, 0.5)) && !module->table.is_contiguous());
    RANK_CHECK(torch::equal(module->wide, torch::full({2}, 0.5, at::kDouble)));
    RANK_CHECK(module->mask.all().item<bool>());  // rank 0's
    RANK_CHECK(head->own.item<float>() == 0.5f);

    module->table.fill_(rank);
    RANK_CHECK(module->table.storage().nbytes() == 6 * sizeof(float));
    sharder.sync_buffers(fsdp::BufferSync::broadcast);
    RANK_CHECK(torch::equal(module->table, torch::zeros({2, 3})));
    fsdp::libtorch::load_buffers(sharder, json);
    RANK_CHECK(torch::equal(module->table, torch::full({2, 3}, 1.0 - rank)));
  });
  CHECK_RANKS();
}

TEST_CASE("ranks whose modules have other buffers get an error at the first forward, and at sync_buffers") {
  for (bool const at_start : {false, true}) {
    std::string text;
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      auto const rank = comm.rank();
      fsdp::Mesh mesh(std::move(comm));
      auto compute = fsdp::host::Stream::inline_stream("compute");
      fsdp::Engine engine(mesh, fsdp::FullShard{}, {}, compute);
      fsdp::libtorch::Sharder sharder{engine};
      auto const module = std::make_shared<BufferedImpl>(rank);
      if (rank == 1) module->register_buffer("more", torch::zeros({2}));
      auto const unit = sharder.shard(module, "unit");
      auto const own = fsdp::testing::what<fsdp::OrderError>([&] {
        if (at_start)
          unit(torch::ones({2, width}));
        else
          sharder.sync_buffers();
      });
      RANK_CHECK(module->wide[0].item<double>() == rank);
      if (rank == 0) text = own;
    });
    CHECK(text ==
          "rank 0: ranks disagree: rank 0 has \"3 buffers in all\", rank 1 has \"buffer 'unit.more' (2), Float\"; "
          "expected the same on all ranks");
  }
  CHECK_RANKS();
}
