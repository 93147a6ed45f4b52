// SPDX-License-Identifier: Apache-2.0
// Each rank keeps its part of the state, and the next unit is gathered while torch computes this one.
// ranks: 1
// needs: LibTorch
// skip-tsan
// skip-asan
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using fsdp::MemoryTag;
using Device = fsdp::host::Device;
using Local = fsdp::local::Communicator<Device>;
using namespace networks;

constexpr std::size_t units = 6;

/// Which units of a rank are being gathered in the pass under way.
using Begun = std::array<std::atomic<bool>, units>;

/// A communicator that notes when an all-gather begins to run on its stream.
class Noting : public fsdp::testing::Forwarding<Noting, Local> {
 public:
  Noting(Local inner, Begun* begun) : Forwarding(std::move(inner)), begun_(begun) {}
  Noting split(int color, int key, std::string_view name) { return {inner().split(color, key, name), begun_}; }
  template <class T>
  fsdp::Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, fsdp::Label label) {
    stream.enqueue(
        [begun = begun_, unit = label.unit.size() == 1 ? static_cast<std::size_t>(label.unit[0] - '0') : units] {
          if (unit < units) (*begun)[unit] = true;
        });
    return inner().all_gather(stream, send, recv, count, label);
  }
  void before(Stream&, fsdp::Label) {}

 private:
  Begun* begun_;
};
static_assert(fsdp::Communicator<Noting>);

/// The flag is set before a minute has passed.
bool comes(std::atomic<bool> const& flag) {
  for (auto const end = std::chrono::steady_clock::now() + std::chrono::minutes(1); !flag;)
    if (std::chrono::steady_clock::now() > end) return false;
  return true;
}
struct Awaiting : torch::autograd::Function<Awaiting> {
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor x, std::int64_t of, std::int64_t begun) {
    context->saved_data["of"] = of;
    context->saved_data["begun"] = begun;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    auto const of = context->saved_data["of"].toInt();
    auto& begun = *reinterpret_cast<Begun*>(context->saved_data["begun"].toInt());
    if (of > 0) RANK_CHECK(comes(begun[static_cast<std::size_t>(of - 1)]));
    return {gradients[0], Tensor(), Tensor()};
  }
};

}  // namespace

TEST_CASE("of parameters, gradients and moments each of four ranks keeps a quarter, and unsharded two slots") {
  for (bool const torch_optimizer : {false, true})
    fsdp::local::run(4, Device{}, [&](Local comm) {
      Settings const settings{.steps = 2, .torch_optimizer = torch_optimizer};
      Trainer<Local> trainer(std::move(comm), named("six layers"), fsdp::FullShard{}, settings);
      trainer.train();
      std::int64_t padded = 0, largest = 0, kept = 0;  // elements
      auto const shards = trainer.engine.shards();
      for (std::size_t u = 0; u < shards.size(); ++u) {
        padded += shards[u].full_numel();
        largest = std::max(largest, shards[u].full_numel());
        for (auto const& part : shards[u].layout().segments(shards[u].shard())) kept += part.count;
      }
      std::int64_t const bytes = padded * 4;
      auto const& account = trainer.engine.account();
      RANK_CHECK(account.reserved(MemoryTag::parameters) == bytes / 4);
      RANK_CHECK(account.reserved(MemoryTag::gradients) == bytes / 4);
      // In torch's optimizer, padding has no moments.
      RANK_CHECK(account.reserved(MemoryTag::optimizer) == (torch_optimizer ? 2 * kept * 4 : 2 * bytes / 4));
      RANK_CHECK(account.reserved(MemoryTag::gather) == 2 * largest * 4);  // this unit and the next
      RANK_CHECK(account.reserved(MemoryTag::reduce) <= 2 * largest * 4);
    });
  CHECK_RANKS();
}

TEST_CASE("while torch computes a unit, forward and backward, the next unit's gather runs") {
  std::array<Begun, 2> begun{};
  fsdp::local::run(2, Device{}, [&](Local comm) {
    auto& own = begun[static_cast<std::size_t>(comm.rank())];
    auto network = named("six layers");
    for (auto& kind : network.kinds) kind = "throws";
    Trainer<Noting> trainer(Noting(std::move(comm), &own), network, fsdp::FullShard{}, {});
    for (std::size_t i = 0; i < units; ++i)
      trainer.units[i]->after = [&own, i](Tensor const& x) {
        if (i + 1 < units) RANK_CHECK(comes(own[i + 1]));
        if (i + 1 == units)
          for (auto& flag : own) flag = false;  // the last unit stays until backward; others are gathered again
        return Awaiting::apply(x, static_cast<std::int64_t>(i), reinterpret_cast<std::int64_t>(&own));
      };
    trainer.make_optimizer();
    for (int step = 0; step < 2; ++step) {
      for (auto& flag : own) flag = false;
      trainer.backward(step);
      trainer.step();
    }
  });
  CHECK_RANKS();
}
