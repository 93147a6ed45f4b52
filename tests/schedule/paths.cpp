// SPDX-License-Identifier: Apache-2.0
// Paths: a step that leaves out or repeats uses has the bits of an engine that declares these uses alone; units that no
// pass comes to are left as they are, or get zeroes; wrong paths are refused by name.
// full-run: [paths]
// timeout: 1800
#include "fsdp/paths.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"
#include "fsdp/optim/muon.hpp"
#include "fsdp/optim/optimizers.hpp"
#include "fsdp/step/check_program.hpp"
#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/toy_model.hpp"

namespace {

using Device = fsdp::host::Device;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<Local>;
using Uses = std::vector<std::size_t>;
using fsdp::testing::has;

constexpr std::int64_t width = 9, hidden = 13, global_rows = 12;
constexpr std::size_t depth = 5, most_places = 8;

/// The text of the error, of this type, that `call` throws.
template <class Failure = fsdp::UsageError, class Call>
std::string what(Call const& call) {
  try {
    call();
  } catch (Failure const& failure) {
    return failure.what();
  }
  return "nothing was thrown";
}

/// Layers that run in any order. Each place of an order has activations of its own.
template <class E>
class Chain {
 public:
  using A = typename E::Param;
  using Layer = toy::Layer<Device, A>;

  explicit Chain(E& engine) : engine_(&engine), rows_(global_rows / engine.world_size()) {
    for (std::size_t place = 0; place <= most_places; ++place) {
      x_.emplace_back(static_cast<std::size_t>(rows_ * width));
      pre_.emplace_back(static_cast<std::size_t>(rows_ * hidden));
      act_.emplace_back(static_cast<std::size_t>(rows_ * hidden));
    }
    target_ = dy_ = x_[0];
    dact_ = dpre_ = pre_[0];
  }
  ~Chain() { engine_->drain(); }
  Chain(Chain const&) = delete;

  /// Declares layer `i` next. @param sets  it begins sums of gradients
  void add(std::size_t i, bool sets, fsdp::UnitId unit) {
    layers_.push_back(engine_->shard(Layer{engine_->device(), rows_, width, hidden, sets}, name(i), unit));
  }
  static std::string name(std::size_t i) { return "h." + std::to_string(i); }
  fsdp::ShardedModule<Layer, E>& operator[](std::size_t use) { return layers_[use]; }
  std::vector<fsdp::UseId> ids(Uses const& uses) const {
    std::vector<fsdp::UseId> ids;
    for (auto const use : uses) ids.push_back(layers_[use]);
    return ids;
  }
  void forward(Uses const& uses, std::int64_t number) {
    auto const& device = engine_->device();
    auto& stream = engine_->compute();
    auto const first = rows_ * engine_->rank();
    device.launch(stream, rows_, toy::Data{}, x_[0].data(), width, static_cast<std::uint32_t>(2 * number), first);
    device.launch(stream, rows_, toy::Data{}, target_.data(), width, static_cast<std::uint32_t>(2 * number + 1), first);
    for (std::size_t at = 0; at < uses.size(); ++at)
      layers_[uses[at]].forward(toy::constant(x_[at].data()), x_[at + 1].data(), saved(at));
  }
  void backward(Uses const& uses, std::size_t end = 0) {
    engine_->device().launch(engine_->compute(), std::int64_t{1}, toy::LossGradient{},
                             toy::constant(x_[uses.size()].data()), toy::constant(target_.data()), dy_.data(), &loss_,
                             rows_ * width, 1.0f / 64, static_cast<float const*>(nullptr));
    for (auto at = uses.size(); at-- > end;)
      layers_[uses[at]].backward(toy::constant(x_[at].data()), dy_.data(), saved(at), dact_.data(), dpre_.data());
  }
  void micro_step(Uses const& uses, std::int64_t number) { forward(uses, number), backward(uses); }
  /// Of all micro-steps, on this rank.
  double loss() {
    engine_->synchronize();
    return loss_;
  }
  std::vector<A> const& output(Uses const& uses) {
    engine_->synchronize();
    return x_[uses.size()];
  }

 private:
  typename Layer::Saved saved(std::size_t at) { return {pre_[at].data(), act_[at].data()}; }

  E* engine_;
  std::int64_t rows_;
  std::vector<std::vector<A>> x_, pre_, act_;
  std::vector<A> target_, dy_, dact_, dpre_;
  double loss_ = 0;
  std::vector<fsdp::ShardedModule<Layer, E>> layers_;
};

/// Path 0 is the declared order.
std::vector<Uses> const orders{{0, 1, 2, 3, 4}, {0, 2, 4}, {1}, {4, 2, 0}, {0, 2, 2, 4}, {1, 3, 1}, {3, 0, 3, 0, 4}};

struct Case {
  int ranks = 2;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  fsdp::EngineOptions options{};
  std::vector<std::size_t> script{};  ///< the path of each step
  int micro_steps = 1;
  bool waits = false;  ///< all but the last micro-step of a step do not reduce
  bool keeps = false;  ///< nor drop parameters
  int sets = 0;        ///< which layers begin sums: none, all, every second
  std::size_t frozen = depth;  ///< a layer that does not train
  bool hooks = false;
};
/// Of rank 0.
struct Result {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> parameters;
  std::vector<fsdp::Counts> counts;  ///< of the last forward and backward pass of each step
  friend bool operator==(Result const&, Result const&) = default;
};
bool sets(Case const& of, std::size_t layer) { return of.sets == 1 || (of.sets == 2 && layer % 2 == 0); }

void require(bool holds, std::string const& text) {
  if (!holds) throw std::logic_error(text);
}
template <class E>
std::map<std::string, std::vector<float>> named(E& engine, bool gradients = false) {
  std::map<std::string, std::vector<float>> all;
  auto const add = [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    all[tensor.name].assign(values.begin(), values.end());
  };
  gradients ? fsdp::export_gradients(engine, add) : fsdp::export_full(engine, add);
  return all;
}
struct Halve {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float* gradients, std::int64_t count) const {
    block.update(
        count, [](float& g) { g *= 0.5f; }, gradients);
  }
};
template <class E>
void add_hooks(E& engine) {
  auto const shards = engine.shards();
  for (std::size_t u = 0; u < shards.size(); ++u)
    if (!shards[u].frozen)
      shards.on_reduced(shards[u], [device = engine.device()](auto& stream, std::span<float> gradients) {
        device.launch(stream, std::int64_t{1}, Halve{}, gradients.data(), std::ssize(gradients));
      });
}
/// The micro-steps of a step.
template <class E>
void step(E& engine, Chain<E>& chain, Case const& of, Uses const& uses, std::size_t number, toy::Tally& tally) {
  for (int micro = 0; micro < of.micro_steps; ++micro) {
    bool const last = micro + 1 == of.micro_steps;
    auto const waits = engine.no_sync(of.waits && !last);
    auto const keeps = engine.keep_unsharded(of.keeps && !last);
    tally.entries.clear();
    chain.micro_step(uses, static_cast<std::int64_t>(number) * of.micro_steps + micro);
  }
}
template <class E>
void expect_as_planned(E& engine) {
  if (auto const problem = check_program(engine.program(), engine.plan_input()); !problem.empty())
    require(false, problem + "\n" + to_text(engine.program()));
  auto const plan = memory_plan(engine.program(), engine.plan_input());
  require(plan.reserved() == engine.account().reserved_state(), "the account is not as planned");
  require(engine.account().peak_live_state() <= plan.live_most, "more bytes are in use than planned");
}
constexpr fsdp::AdamWOptions adamw_options{.lr = 0.02f, .weight_decay = 0.1f};

/// One engine with all paths.
template <class P = fsdp::Fp32>
Result follow(Case const& of) {
  Result result;
  fsdp::local::run(of.ranks, Device{}, [&](Local local) {
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    auto options = of.options;
    options.without_gradient = fsdp::WithoutGradient::untouched;
    fsdp::Engine<Comm, P> engine(mesh, of.strategy, options);
    Chain chain(engine);
    for (std::size_t i = 0; i < depth; ++i)
      chain.add(i, sets(of, i), engine.add_unit(chain.name(i), fsdp::UnitOptions{.frozen = i == of.frozen}));
    std::vector<fsdp::PathId> paths(1);
    for (std::size_t path = 1; path < orders.size(); ++path)
      paths.push_back(engine.add_path("path " + std::to_string(path), chain.ids(orders[path])));
    if (of.hooks) add_hooks(engine);
    fsdp::AdamW adamw(engine, adamw_options);
    std::vector<double> losses;
    std::vector<fsdp::Counts> counts;
    for (std::size_t i = 0; i < of.script.size(); ++i) {
      auto const path = of.script[i];
      auto const scope = engine.follow(paths[path]);
      step(engine, chain, of, orders[path], i, *tally);
      counts.push_back(toy::counts_of(*tally, 0, "forward"));
      counts.push_back(toy::counts_of(*tally, 0, "backward"));
      if (of.micro_steps == 1) {
        require(counts.back() == count(engine.program(), fsdp::Phase::backward, fsdp::plain_step, path),
                "the engine counts otherwise than its program");
        require(counts[counts.size() - 2] == count(engine.program(), fsdp::Phase::forward, fsdp::plain_step, path),
                "the engine counts otherwise than its program");
      }
      require(engine.account().live(fsdp::MemoryTag::gather) == 0, "a backward pass leaves parameters");
      adamw.step(fsdp::clip_grad_norm(engine, 0.05f));
      losses.push_back(chain.loss());
    }
    expect_as_planned(engine);
    require(engine.shards().late_records() == 0, "an event is late");
    auto parameters = named(engine);
    if (engine.rank() == 0) result = {std::move(losses), std::move(parameters), std::move(counts)};
  });
  return result;
}

/// What a rank keeps of a unit between engines.
struct Kept {
  std::vector<float> master, moments[2];
};
/// For each step, an engine that declares the uses of the path alone.
template <class P = fsdp::Fp32>
Result declare(Case const& of) {
  Result result;
  fsdp::local::run(of.ranks, Device{}, [&](Local local) {
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    std::map<std::string, Kept> kept;
    std::map<std::string, std::vector<float>> parameters;
    std::vector<double> losses;
    std::vector<fsdp::Counts> counts;
    double loss = 0;
    bool first = false;
    for (std::size_t i = 0; i < of.script.size() + 1; ++i) {
      auto const& order = orders[i == 0 ? 0 : of.script[i - 1]];  // first, the declared one, for initial parameters
      fsdp::Engine<Comm, P> engine(mesh, of.strategy, of.options);
      first = engine.rank() == 0;
      Chain chain(engine);
      std::array<fsdp::UnitId, depth> units{};
      for (std::size_t layer = 0; layer < depth; ++layer)
        if (std::find(order.begin(), order.end(), layer) != order.end())
          units[layer] = engine.add_unit(chain.name(layer), fsdp::UnitOptions{.frozen = layer == of.frozen});
      for (auto const layer : order) chain.add(layer, sets(of, layer), units[layer]);
      if (of.hooks) add_hooks(engine);
      fsdp::AdamW adamw(engine, adamw_options);
      auto const shards = engine.shards();
      auto const each = [&](auto const& act) {
        engine.synchronize();
        for (std::size_t u = 0; u < shards.size(); ++u) {
          if (!shards[u].trains()) continue;
          auto const writing = shards.write(shards[u]);
          auto& of_unit = kept[shards[u].name()];
          auto const elements = static_cast<std::size_t>(shards[u].shard_numel());
          act(shards[u].master, of_unit.master, elements);
          for (std::size_t which : {0u, 1u}) act(adamw.state(which, u), of_unit.moments[which], elements);
        }
        engine.synchronize();
      };
      if (i > 0) {
        each([](float* to, std::vector<float> const& from, std::size_t) { std::copy(from.begin(), from.end(), to); });
        adamw.set_steps(static_cast<std::int64_t>(i - 1));
        Uses all(order.size());
        for (std::size_t use = 0; use < all.size(); ++use) all[use] = use;
        step(engine, chain, of, all, i - 1, *tally);
        counts.push_back(toy::counts_of(*tally, 0, "forward"));
        counts.push_back(toy::counts_of(*tally, 0, "backward"));
        adamw.step(fsdp::clip_grad_norm(engine, 0.05f));
        losses.push_back(loss += chain.loss());
      }
      each([](float const* from, std::vector<float>& to, std::size_t n) { to.assign(from, from + n); });
      for (auto& [name, values] : named(engine)) parameters[name] = std::move(values);
    }
    if (first) result = {std::move(losses), std::move(parameters), std::move(counts)};
  });
  return result;
}

std::vector<fsdp::ShardingStrategy> strategies(int ranks) {
  std::vector<fsdp::ShardingStrategy> all{fsdp::FullShard{}, fsdp::ShardGradOp{}, fsdp::NoShard{}};
  if (ranks == 4) all.push_back(fsdp::HybridShard<fsdp::FullShard>{2});
  return all;
}

template <class P = fsdp::Fp32>
void compare(Case const& of) {
  INFO("ranks " << of.ranks << ", " << of.strategy.name << ", prefetch " << of.options.prefetch << ", script "
                << fsdp::listed(of.script) << ", micro-steps " << of.micro_steps << ", waits " << of.waits << ", keeps "
                << of.keeps << ", sets " << of.sets << ", frozen " << of.frozen);
  auto const followed = follow<P>(of), declared = declare<P>(of);
  REQUIRE(followed.losses.size() == of.script.size());
  for (std::size_t i = 0; i < of.script.size(); ++i) {
    INFO("step " << i << ", path " << of.script[i]);
    CHECK(followed.losses[i] == Approx(declared.losses[i]).epsilon(1e-12));  // sums of losses begin anew
    CHECK((followed.counts[2 * i] == declared.counts[2 * i]));
    CHECK((followed.counts[2 * i + 1] == declared.counts[2 * i + 1]));
  }
  CHECK(followed.parameters.size() == 3 * depth);
  CHECK((followed.parameters == declared.parameters));
}

}  // namespace

TEST_CASE("a path has the bits and the collectives of an engine that declares its uses alone") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const prefetch = GENERATE(0, 1, 2, 3);
  for (auto const& strategy : strategies(ranks)) {
    Case of{ranks, strategy};
    of.script = {1, 2, 0, 3, 4, 5, 6, 1, 5, 5, 0, 4, 2, 6};
    of.options.prefetch = prefetch;
    of.sets = (ranks + prefetch) % 3;
    compare(of);
  }
}
