// SPDX-License-Identifier: Apache-2.0
// Paths: a step that leaves out or repeats uses has the bits of an engine that declares these uses alone; units that no
// pass comes to are left as they are, or get zeroes; wrong paths are refused by name.
// full-run: [paths]
// timeout: 1800
// skip-tsan
#include "fsdp/paths.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/step/check_program.hpp"
#include "fsdp/ema.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/muon.hpp"
#include "fsdp/offload.hpp"
#include "fsdp/optimizers.hpp"
#include "tests/catch.hpp"
#include "tests/support/counting.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/step_inputs.hpp"
#include "tests/support/strategies.hpp"
#include "tests/support/toy_model.hpp"

namespace {

using Device = fsdp::host::Device;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<Local>;
using Uses = std::vector<std::size_t>;
using fsdp::testing::has;

constexpr std::int64_t width = 9, hidden = 13, global_rows = 12;
constexpr std::size_t depth = 5, most_places = 5;

/// The text of the UsageError, or of the error of another type, that `call` throws.
template <class Failure = fsdp::UsageError, class Call>
std::string what(Call const& call) {
  return fsdp::testing::what<Failure>(call);
}

/// Has the tensors of a layer, and a gradient of zeroes.
struct Idle {
  template <class T>
  using Params = toy::Layer<Device>::Params<T>;
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    toy::Layer<Device>{{}, 1, width, hidden}.describe(p, tensor);
  }
  template <class W>
  void forward(fsdp::host::Stream&, Params<W> const&) const {}
  template <class W, class G>
  void backward(fsdp::host::Stream&, Params<W> const&, Params<G> const&) const {}
};

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
  /// The use and the next one are a segment.
  void recompute(std::size_t use) {
    engine_->recompute_segment(layers_[use], layers_[use + 1]);
    recomputed = use + 1;
  }
  void forward(Uses const& uses, std::int64_t number) {
    auto const& device = engine_->device();
    auto& stream = engine_->compute();
    auto const first = rows_ * engine_->rank();
    device.launch(stream, rows_, toy::Data{}, x_[0].data(), width, static_cast<std::uint32_t>(2 * number), first);
    device.launch(stream, rows_, toy::Data{}, target_.data(), width, static_cast<std::uint32_t>(2 * number + 1), first);
    for (auto& module : idle) module.forward();
    for (std::size_t at = 0; at < uses.size(); ++at)
      layers_[uses[at]].forward(toy::constant(x_[at].data()), x_[at + 1].data(), saved(at));
  }
  void backward(Uses const& uses, std::size_t end = 0) {
    engine_->device().launch(engine_->compute(), std::int64_t{1}, toy::LossGradient{},
                             toy::constant(x_[uses.size()].data()), toy::constant(target_.data()), dy_.data(), &loss_,
                             rows_ * width, 1.0f / 64, scale);
    for (auto at = uses.size(); at-- > end;) {
      for (auto again = at - 1; uses[at] == recomputed && again <= at; ++again)
        layers_[uses[again]].recompute(toy::constant(x_[again].data()), x_[again + 1].data(), saved(again));
      layers_[uses[at]].backward(toy::constant(x_[at].data()), dy_.data(), saved(at), dact_.data(), dpre_.data());
    }
    for (auto at = idle.size(); at-- > 0;) idle[at].backward();
  }
  void micro_step(Uses const& uses, std::int64_t number) { forward(uses, number), backward(uses); }
  /// Loss of all micro-steps, on this rank.
  double loss() {
    engine_->synchronize();
    return loss_;
  }
  std::vector<A> const& output(Uses const& uses) {
    engine_->synchronize();
    return x_[uses.size()];
  }
  std::vector<fsdp::ShardedModule<Idle, E>> idle;  ///< declared first
  float const* scale = nullptr;                    ///< of the loss
  std::size_t recomputed = ~std::size_t{0};        ///< the last use of a segment of two

 private:
  typename Layer::Saved saved(std::size_t at) { return {pre_[at].data(), act_[at].data()}; }

  E* engine_;
  std::int64_t rows_;
  std::vector<std::vector<A>> x_, pre_, act_;
  std::vector<A> target_, dy_, dact_, dpre_;
  double loss_ = 0;
  std::vector<fsdp::ShardedModule<Layer, E>> layers_;
};

/// Path 0 is the declared order. From `whole_segments` on, paths have all of the segment of layers 1 and 2.
std::vector<Uses> const orders{{0, 1, 2, 3, 4}, {0, 2, 4},       {1},       {4, 2, 0}, {0, 2, 2, 4},
                               {1, 3, 1},       {3, 0, 3, 0, 4}, {1, 2, 4}, {3, 1, 2}, {4, 0, 1, 2, 0}};
constexpr std::size_t whole_segments = 7;

/// How a step updates. All but AdamW have no state, so that an engine can go on where another has ended.
enum class Updates { adamw, offloaded, scaled, sgd, muon };
struct Case {
  int ranks = 2;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  fsdp::EngineOptions options{};
  std::vector<std::size_t> script{};  ///< the path of each step
  int micro_steps = 1;
  bool waits = false;          ///< all but the last micro-step of a step do not reduce
  bool keeps = false;          ///< nor drop parameters
  int sets = 0;                ///< which layers begin sums: none, all, every second
  std::size_t frozen = depth;  ///< a layer that does not train
  bool hooks = false;
  bool zeros = false;     ///< units that a path leaves out get zeroes
  bool segments = false;  ///< one engine recomputes layers 1 and 2 together
  Updates updates = Updates::adamw;
};
/// Results of rank 0.
struct Result {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> parameters;
  std::vector<fsdp::Counts> counts;  ///< of the last forward and backward pass of each step
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
  if (engine.plan_input().offload.any()) return;  // tests of offloading compare bytes
  auto const& account = engine.account();
  require(plan.reserved() - plan.optimizer == account.reserved_state() - account.reserved(fsdp::MemoryTag::optimizer),
          "the account is not as planned");
  require(account.peak_live_state() <= plan.live_most, "more bytes are in use than planned");
}
/// An optimizer of the case.
template <class E>
class Optimizer {
 public:
  Optimizer(E& engine, Updates updates) : engine_(&engine), updates_(updates) {
    fsdp::AdamWOptions const options{.lr = 0.02f, .weight_decay = 0.1f};
    if (updates == Updates::scaled) scaler_ = std::make_unique<fsdp::GradScaler<E>>(engine);
    if (updates == Updates::muon) muon_ = std::make_unique<fsdp::Muon<E>>(engine, fsdp::matching("*.up"), muon_options);
    if (updates == Updates::muon || updates == Updates::sgd) {
      sgd_ = std::make_unique<fsdp::Sgd<E>>(engine, muon_ ? muon_->rest() : fsdp::TensorSelection::all(),
                                            fsdp::SgdOptions{.lr = 0.1f, .weight_decay = 0.01f});
    } else {
      adamw_ = std::make_unique<fsdp::AdamW<E>>(engine, options);
    }
  }
  float const* scale() const { return scaler_ ? scaler_->scale() : nullptr; }
  void step() {
    auto const norm = fsdp::clip_grad_norm(*engine_, 0.05f);
    if (muon_) return fsdp::Optimizers{*muon_, *sgd_}.step(norm);
    if (sgd_) return sgd_->step(norm);
    scaler_ ? scaler_->step(*adamw_, 0.02f, norm) : adamw_->step(norm);
  }
  fsdp::AdamW<E>* adamw() { return adamw_.get(); }

 private:
  static constexpr fsdp::MuonOptions muon_options{.lr = 0.02f, .momentum = 0.0f, .weight_decay = 0.1f};
  E* engine_;
  Updates updates_;
  std::unique_ptr<fsdp::GradScaler<E>> scaler_;
  std::unique_ptr<fsdp::AdamW<E>> adamw_;
  std::unique_ptr<fsdp::Muon<E>> muon_;
  std::unique_ptr<fsdp::Sgd<E>> sgd_;
};
/// One engine with all paths.
template <class P = fsdp::Fp32>
Result follow(Case const& of) {
  Result result;
  fsdp::local::run(of.ranks, Device{}, [&](Local local) {
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    auto options = of.options;
    options.without_gradient = of.zeros ? fsdp::WithoutGradient::zeros : fsdp::WithoutGradient::untouched;
    fsdp::Engine<Comm, P> engine(mesh, of.strategy, options);
    Chain chain(engine);
    for (std::size_t i = 0; i < depth; ++i)
      chain.add(i, sets(of, i), engine.add_unit(chain.name(i), fsdp::UnitOptions{.frozen = i == of.frozen}));
    std::vector<fsdp::PathId> paths(1);
    for (std::size_t path = 1; path < orders.size(); ++path)
      paths.push_back(of.segments && path < whole_segments
                          ? fsdp::PathId{}
                          : engine.add_path("path " + std::to_string(path), chain.ids(orders[path])));
    if (of.segments) chain.recompute(1);
    if (of.hooks) add_hooks(engine);
    constexpr bool narrow = !std::is_same_v<typename P::Param, float>;
    if (of.updates == Updates::offloaded)
      fsdp::offload(engine, {.moments = true, .masters = narrow, .gradients = !of.zeros});
    Optimizer optimizer(engine, of.updates);
    chain.scale = optimizer.scale();
    std::vector<double> losses;
    std::vector<fsdp::Counts> counts;
    for (std::size_t i = 0; i < of.script.size(); ++i) {
      auto const path = of.script[i];
      auto const scope = engine.follow(paths[path]);
      step(engine, chain, of, orders[path], i, *tally);
      counts.push_back(toy::counts_of(*tally, 0, "forward"));
      counts.push_back(toy::counts_of(*tally, 0, "backward"));
      if (of.micro_steps == 1) {
        require(counts.back() == count(engine.program(), fsdp::PassKind::backward, fsdp::plain_step, paths[path].index),
                "the engine counts otherwise than its program");
        require(counts[counts.size() - 2] ==
                    count(engine.program(), fsdp::PassKind::forward, fsdp::plain_step, paths[path].index),
                "the engine counts otherwise than its program");
      }
      require(engine.account().live(fsdp::MemoryTag::gather) == 0, "a backward pass leaves parameters");
      optimizer.step();
      losses.push_back(chain.loss());
    }
    expect_as_planned(engine);
    require(engine.shards().late_events() == 0, "an event is late");
    auto parameters = named(engine);
    if (engine.rank() == 0) result = {std::move(losses), std::move(parameters), std::move(counts)};
  });
  return result;
}

/// State of a unit on a rank, between engines.
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
        if (of.zeros || std::find(order.begin(), order.end(), layer) != order.end())
          units[layer] = engine.add_unit(chain.name(layer), fsdp::UnitOptions{.frozen = layer == of.frozen});
      for (std::size_t layer = 0; of.zeros && layer < depth; ++layer)
        if (std::find(order.begin(), order.end(), layer) == order.end())
          chain.idle.push_back(engine.shard(Idle{}, chain.name(layer), units[layer]));
      for (auto const layer : order) chain.add(layer, sets(of, layer), units[layer]);
      if (of.segments)
        chain.recompute(static_cast<std::size_t>(std::find(order.begin(), order.end(), 1u) - order.begin()));
      if (of.hooks) add_hooks(engine);
      Optimizer optimizer(engine, of.updates == Updates::offloaded ? Updates::adamw : of.updates);
      chain.scale = optimizer.scale();
      auto* const adamw = optimizer.adamw();
      auto const shards = engine.shards();
      auto const each = [&](auto const& act) {
        engine.synchronize();
        for (std::size_t u = 0; u < shards.size(); ++u) {
          if (!shards[u].trains()) continue;
          auto const writing = shards.write(shards[u]);
          auto& of_unit = kept[shards[u].name()];
          auto const elements = static_cast<std::size_t>(shards[u].shard_numel());
          act(shards[u].master, of_unit.master, elements);
          for (std::size_t which : {0u, 1u})
            if (adamw != nullptr) act(adamw->state(which, u), of_unit.moments[which], elements);
        }
        engine.synchronize();
      };
      if (i > 0) {
        each([](float* to, std::vector<float> const& from, std::size_t) { std::copy(from.begin(), from.end(), to); });
        if (adamw != nullptr) adamw->set_steps(static_cast<std::int64_t>(i - 1));
        Uses all(order.size());
        for (std::size_t use = 0; use < all.size(); ++use) all[use] = use;
        step(engine, chain, of, all, i - 1, *tally);
        counts.push_back(toy::counts_of(*tally, 0, "forward"));
        counts.push_back(toy::counts_of(*tally, 0, "backward"));
        optimizer.step();
        losses.push_back(loss += chain.loss());
      }
      each([](float const* from, std::vector<float>& to, std::size_t n) { to.assign(from, from + n); });
      for (auto& [name, values] : named(engine)) parameters[name] = std::move(values);
    }
    if (first) result = {std::move(losses), std::move(parameters), std::move(counts)};
  });
  return result;
}

using fsdp::testing::strategies;
using fsdp::testing::strategies_in_turn;

template <class P = fsdp::Fp32>
void compare(Case const& of) {
  if (!fsdp::testing::next_cell(11)) return;  // no axis has a multiple of 5, 7 or 11 values: all take turns
  INFO("ranks " << of.ranks << ", " << of.strategy.name << ", prefetch " << of.options.prefetch << ", script "
                << fsdp::listed(of.script) << ", micro-steps " << of.micro_steps << ", waits " << of.waits << ", keeps "
                << of.keeps << ", sets " << of.sets << ", frozen " << of.frozen);
  auto const followed = follow<P>(of), declared = declare<P>(of);
  REQUIRE(followed.losses.size() == of.script.size());
  for (std::size_t i = 0; i < of.script.size(); ++i) {
    INFO("step " << i << ", path " << of.script[i]);
    CHECK(followed.losses[i] == Approx(declared.losses[i]).epsilon(1e-12));  // sums of losses begin anew
    if (of.zeros) continue;                                                  // it gathers for nothing
    CHECK((followed.counts[2 * i] == declared.counts[2 * i]));
    auto backward = followed.counts[2 * i + 1];
    // Gradient shards of a path may lie apart; then the path has more buckets.
    if (!of.strategy.shards) backward.all_reduce.calls = declared.counts[2 * i + 1].all_reduce.calls;
    CHECK((backward == declared.counts[2 * i + 1]));
  }
  CHECK(followed.parameters.size() == 3 * depth);
  CHECK((followed.parameters == declared.parameters));
}

}  // namespace

namespace {

void compare_alone(int ranks, int prefetch, fsdp::ShardingStrategy const& strategy) {
  Case of{ranks, strategy};
  of.script = {1, 2, 0, 3, 4, 5, 6, 1, 5, 5, 0, 4, 2, 6};
  of.options.prefetch = prefetch;
  of.sets = (ranks + prefetch) % 3;
  compare(of);
}

}  // namespace

TEST_CASE("a path has the bits and the collectives of an engine that declares its uses alone") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const prefetch = GENERATE(0, 1, 2, 3);
  for (auto const& strategy : strategies_in_turn(ranks, ranks, prefetch)) compare_alone(ranks, prefetch, strategy);
}

TEST_CASE("a path has the bits of its uses alone with every strategy at every depth of prefetch", "[.][paths]") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const prefetch = GENERATE(0, 1, 2, 3);
  for (auto const& strategy : strategies(ranks)) compare_alone(ranks, prefetch, strategy);
}

TEST_CASE("a path has the bits of its uses alone when gradients accumulate, and parameters are kept or not") {
  int const ranks = GENERATE(1, 2, 3, 4);
  for (auto const& strategy : strategies(ranks)) {
    Case of{ranks, strategy};
    of.script = {1, 5, 0, 4, 6, 1, 3};
    of.micro_steps = 3;
    compare(of);
    of.waits = of.options.allow_no_sync = true;
    of.sets = 1;
    compare(of);
    if (strategy.reshards_after_forward) {
      of.keeps = of.options.allow_keep_unsharded = true;
      compare(of);
    }
  }
}

namespace {

/// @param all  every strategy has each option on 2 ranks and on 4; else the options take turns
void compare_options(int ranks, bool all) {
  std::size_t count = 0, of_strategies = 0;
  for (auto const& strategy : strategies(ranks)) {
    Case const plain{ranks, strategy, {}, {1, 0, 2, 5, 6, 3, 4, 1}};
    auto turn = of_strategies++;
    auto const with = [&](auto const& change) {
      auto of = plain;
      of.sets = static_cast<int>(count++ % 3);
      bool const on_2 = turn++ % 2 == 0;
      if (!all && !strategy.grouped && on_2 != (ranks == 2)) return;
      change(of);
      compare(of);
    };
    with([](Case& of) { of.options.keep_last = false; });
    with([](Case& of) { of.options.keep_root = false; });
    with([](Case& of) { of.options.max_ahead_bytes = 1000, of.options.prefetch = 3; });
    with([](Case& of) { of.options.bucket_bytes = of.options.first_bucket_bytes = 1024; });
    with([](Case& of) { of.options.reduce_dtype = fsdp::DType::bf16; });
    with([](Case& of) { of.frozen = 0; });
    with([](Case& of) { of.frozen = 4, of.script = {1, 0, 5, 3, 4}; });
    with([](Case& of) { of.hooks = true; });
    with([](Case& of) { of.hooks = true, of.options.bucket_bytes = of.options.first_bucket_bytes = 700; });
    with([](Case& of) { of.updates = Updates::offloaded; });
    with([](Case& of) { of.updates = Updates::scaled; });
    with([](Case& of) { of.updates = Updates::sgd; });
    with([](Case& of) { of.updates = Updates::muon; });
    if (ranks == 4 && strategy.reshards_after_forward && !strategy.grouped)
      with([](Case& of) { of.options.reshard_ranks = 2; });
  }
}

}  // namespace

TEST_CASE("a path has the bits of its uses alone with each option, frozen layers and functions on reduced gradients") {
  compare_options(GENERATE(2, 4), false);
}

TEST_CASE("a path has the bits of its uses alone with each option of every strategy on 2 ranks and on 4",
          "[.][paths]") {
  compare_options(GENERATE(2, 4), true);
}

namespace {

/// @param all  every strategy has every kind of case at both depths of prefetch; else they take turns
void compare_segments(int ranks, int prefetch, bool all) {
  std::array const frozen{depth, std::size_t{1}, std::size_t{2}, std::size_t{4}, depth};  // by kind
  for (int kind = 0; kind < 5; ++kind) {
    if (!all && (kind + ranks / 2) % 2 != prefetch / 2) continue;
    for (auto const& strategy : all ? strategies(ranks) : strategies_in_turn(ranks, ranks / 2, kind)) {
      Case of{ranks, strategy};
      of.options.prefetch = prefetch, of.segments = true;
      of.script = {7, 0, 8, 9, 7};
      of.frozen = frozen[static_cast<std::size_t>(kind)];
      if (kind == 4) of.micro_steps = 2, of.waits = of.options.allow_no_sync = true;
      compare(of);
    }
  }
}

}  // namespace

TEST_CASE("a path that has all of a segment, which is recomputed, has the bits of its uses alone") {
  int const ranks = GENERATE(1, 2, 4);
  compare_segments(ranks, GENERATE(0, 2), false);
}

TEST_CASE("a path with segments has the bits of its uses alone under every strategy at every depth of prefetch",
          "[.][paths]") {
  int const ranks = GENERATE(1, 2, 4);
  compare_segments(ranks, GENERATE(0, 2), true);
}

TEST_CASE("a path has the bits of its uses alone in bf16, where unreduced gradients wait in an accumulator") {
  int const ranks = GENERATE(1, 2, 4);
  for (auto const& strategy : strategies(ranks)) {
    Case of{ranks, strategy};
    of.script = {1, 0, 2, 5, 6, 3, 4, 1};
    compare<fsdp::Bf16>(of);
    of.updates = Updates::offloaded;
    compare<fsdp::Bf16>(of);
    of.updates = Updates::adamw;
    of.micro_steps = 2, of.waits = of.options.allow_no_sync = true;
    compare<fsdp::Bf16>(of);
  }
}

namespace {

/// @param all  every strategy has every kind of update; else they take turns
void compare_zeros(int ranks, bool all) {
  int kind = 0;
  for (auto const updates : {Updates::adamw, Updates::offloaded, Updates::scaled, Updates::sgd, Updates::muon}) {
    for (auto const& strategy : all ? strategies(ranks) : strategies_in_turn(ranks, ranks / 2, kind)) {
      Case of{ranks, strategy};
      of.script = {1, 0, 2, 5, 6, 3, 4, 1};
      of.zeros = true, of.updates = updates;
      compare(of);
    }
    ++kind;
  }
}

}  // namespace

TEST_CASE("units that get zeroes have the bits of modules whose gradients are zero") {
  compare_zeros(GENERATE(1, 2, 4), false);
}

TEST_CASE("units that get zeroes have the bits of zero gradients under every strategy, whatever updates them",
          "[.][paths]") {
  compare_zeros(GENERATE(1, 2, 4), true);
}

TEST_CASE("layers dropped at random in each step have the bits of their uses alone, in every setting", "[.][paths]") {
  int const ranks = GENERATE(1, 2, 3, 4);
  int const prefetch = GENERATE(0, 1, 2, 3);
  auto const updates = GENERATE(Updates::adamw, Updates::sgd, Updates::muon);
  bool const zeros = GENERATE(false, true);
  std::uint32_t state = 1;
  for (auto const& strategy : strategies(ranks)) {
    for (int const micro_steps : {1, 3}) {
      Case of{ranks, strategy};
      for (int i = 0; i < 20; ++i) {
        state = state * 1664525u + 1013904223u;
        of.script.push_back((state >> 16) % whole_segments);
      }
      of.micro_steps = micro_steps, of.waits = of.options.allow_no_sync = micro_steps > 1 && (state & 1u << 20) != 0;
      of.options.prefetch = prefetch, of.updates = updates, of.zeros = zeros;
      of.sets = static_cast<int>((state >> 18) % 3);
      compare(of);
    }
  }
}

namespace {

/// Two towers over a shared trunk: path 1 has layers 0 and 1, path 2 has 2 and 3; layer 4 is in both.
template <class Act>
void with_towers(int ranks, fsdp::ShardingStrategy const& strategy, fsdp::EngineOptions options, Act const& act) {
  fsdp::local::run(ranks, Device{}, [&](Local local) {
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    fsdp::Engine<Comm> engine(mesh, strategy, options);
    Chain chain(engine);
    for (std::size_t i = 0; i < depth; ++i) chain.add(i, false, engine.add_unit(chain.name(i)));
    auto const text = engine.add_path("text", chain.ids({0, 1, 4}));
    auto const image = engine.add_path("image", chain.ids({2, 3, 4}));
    act(engine, chain, text, image, *tally);
  });
  CHECK_RANKS();
}
Uses const text_uses{0, 1, 4}, image_uses{2, 3, 4}, all_uses{0, 1, 2, 3, 4};
constexpr fsdp::EngineOptions untouched{
    .allow_no_sync = true, .allow_frozen_parameters = true, .without_gradient = fsdp::WithoutGradient::untouched};
using Gradients = std::map<std::string, std::vector<float>>;

/// The gradients of one micro-step in a path, which are then forgotten.
template <class E>
Gradients gradients_of(E& engine, Chain<E>& chain, fsdp::PathId path, Uses const& uses, std::int64_t number) {
  auto const scope = engine.follow(path);
  chain.micro_step(uses, number);
  auto gradients = named(engine, true);
  engine.discard_gradients();
  return gradients;
}
void add(Gradients& sum, Gradients const& more) {
  for (auto const& [name, values] : more) {
    auto& to = sum[name];
    if (to.empty()) to.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
  }
}

}  // namespace

TEST_CASE("an engine may have hundreds of paths: those that it follows have the same bits, and no event is late") {
  // All orders of one to four of the five layers, with and without repetitions: 780 paths. Up to three layers: 155.
  std::size_t const longest = fsdp::testing::sanitized ? 3 : 4;
  std::vector<Uses> all;
  for (std::size_t length = 1, count = depth; length <= longest; ++length, count *= depth)
    for (std::size_t number = 0; number < count; ++number) {
      auto& uses = all.emplace_back();
      for (std::size_t place = 0, rest = number; place < length; ++place, rest /= depth) uses.push_back(rest % depth);
    }
  std::mt19937 random(26);
  std::vector<std::size_t> script(40);
  for (auto& path : script) path = random() % all.size();
  auto const run = [&](bool some) {
    std::map<std::string, std::vector<float>> parameters;
    fsdp::local::run(2, Device{}, [&](Local local) {
      fsdp::Mesh<Comm> mesh(Comm(std::move(local), std::make_shared<toy::Tally>()));
      fsdp::Engine engine(mesh, fsdp::FullShard{}, {.without_gradient = fsdp::WithoutGradient::untouched});
      Chain chain(engine);
      for (std::size_t i = 0; i < depth; ++i) chain.add(i, false, engine.add_unit(chain.name(i)));
      std::map<std::size_t, fsdp::PathId> paths;
      for (std::size_t path = 0; path < all.size(); ++path)
        if (!some || std::find(script.begin(), script.end(), path) != script.end())
          paths[path] = engine.add_path(std::to_string(path), chain.ids(all[path]));
      fsdp::AdamW adamw(engine, {.lr = 0.02f});
      for (std::size_t i = 0; i < script.size(); ++i) {
        auto const scope = engine.follow(paths.at(script[i]));
        chain.micro_step(all[script[i]], static_cast<std::int64_t>(i));
        if (i % 3 != 0) adamw.step();
      }
      require(engine.shards().late_events() == 0, "an event is late");
      auto values = named(engine);
      if (engine.rank() == 0) parameters = std::move(values);
    });
    return parameters;
  };
  auto const parameters = run(false);
  CHECK(parameters.size() == 3 * depth);
  CHECK((parameters == run(true)));
}

TEST_CASE("micro-steps of a step may follow different paths: a unit has the sum of its gradients") {
  int const ranks = GENERATE(1, 2, 4);
  for (auto const& strategy : strategies(ranks)) {
    with_towers(ranks, strategy, untouched, [](auto& engine, auto& chain, auto text, auto image, auto&) {
      fsdp::Sgd sgd(engine, {.lr = 0.1f});
      auto sum = gradients_of(engine, chain, text, text_uses, 1);
      auto const second = gradients_of(engine, chain, image, image_uses, 2);
      if (engine.rank() == 0) RANK_CHECK(sum.size() == 9 && second.size() == 9);
      add(sum, second);
      add(sum, gradients_of(engine, chain, text, text_uses, 3));
      auto const before = named(engine);
      for (auto const& [path, uses, number] :
           {std::tuple(text, &text_uses, 1), {image, &image_uses, 2}, {text, &text_uses, 3}}) {
        auto const scope = engine.follow(path);
        chain.micro_step(*uses, number);
      }
      auto const gradients = named(engine, true);
      // NoShard sums in place: the mean so far and a further term in one all-reduce, which rounds in another order.
      for (auto const& [name, values] : gradients)
        for (std::size_t i = 0; i < values.size(); ++i)
          RANK_CHECK(std::abs(values[i] - sum.at(name)[i]) <= (engine.strategy().shards ? 0.0f : 1e-7f));
      sgd.step();
      RANK_CHECK(named(engine, true) == gradients);  // those of the last step
      auto const after = named(engine);
      for (auto const& [name, values] : after) RANK_CHECK(values != before.at(name));
      // Text alone: image stays, and only text's gradients are those of the last step.
      {
        auto const scope = engine.follow(text);
        chain.micro_step(text_uses, 4);
      }
      sgd.step();
      auto const now = named(engine);
      for (auto const& [name, values] : now)
        RANK_CHECK((values == after.at(name)) == (name.starts_with("h.2") || name.starts_with("h.3")));
      auto const exported = named(engine, true);
      if (engine.rank() == 0) RANK_CHECK(exported.size() == 9 && exported.count("h.2.up") == 0);
    });
  }
}

TEST_CASE("an average has all weights, of units that a path leaves out too") {
  int const ranks = GENERATE(1, 2, 4);
  for (auto const& strategy : strategies(ranks)) {
    with_towers(ranks, strategy, untouched, [](auto& engine, auto& chain, auto text, auto image, auto&) {
      fsdp::AdamW adamw(engine, {.lr = 0.05f, .weight_decay = 0.1f});
      fsdp::Ema ema(engine, 0.75f);
      auto whole = named(engine);
      auto const before = whole;  // on rank 0
      for (auto const& [path, uses, number] :
           {std::tuple(text, &text_uses, 1), {image, &image_uses, 2}, {text, &text_uses, 3}}) {
        auto const scope = engine.follow(path);
        chain.micro_step(*uses, number);
        adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
        ema.update();
        for (auto const& [name, values] : named(engine))
          for (std::size_t i = 0; i < values.size(); ++i)
            whole[name][i] = fsdp::math::mul_add(0.75f, whole[name][i], 0.25f * values[i]);
        if (number == 1 && engine.rank() == 0) RANK_CHECK(whole.at("h.2.up") == before.at("h.2.up"));
      }
      auto const weights = named(engine);
      {
        auto const swapped = ema.swap();
        RANK_CHECK(named(engine) == whole);
      }
      RANK_CHECK(named(engine) == weights);
    });
  }
}

TEST_CASE("parameters that a pass leaves unsharded are not there for a pass of another path") {
  int const ranks = GENERATE(1, 2, 4);
  for (auto const& strategy : strategies(ranks)) {
    std::vector<Gradients> sums(2);
    for (bool const keeps : {false, true}) {
      auto options = untouched;
      options.allow_keep_unsharded = keeps;
      with_towers(ranks, strategy, options, [&](auto& engine, auto& chain, auto text, auto image, auto&) {
        fsdp::AdamW adamw(engine);
        for (std::int64_t step = 0; step < 2; ++step) {
          auto const kept = engine.keep_unsharded(keeps);
          for (auto const& [path, uses] : {std::pair(text, &text_uses),
                                           {text, &text_uses},
                                           {image, &image_uses},
                                           {fsdp::PathId{}, &all_uses},
                                           {image, &image_uses}}) {
            auto const scope = engine.follow(path);
            chain.micro_step(*uses, step);
          }
          if (step == 0) adamw.step();
        }
        auto gradients = named(engine, true);
        if (engine.rank() == 0) sums[keeps ? 1 : 0] = std::move(gradients);
      });
    }
    CHECK((sums[0] == sums[1]));
  }
}

TEST_CASE("scopes of paths may end in any order: the newest that lives counts") {
  with_towers(2, fsdp::FullShard{}, untouched, [](auto& engine, auto& chain, auto text, auto image, auto&) {
    using Scope = decltype(engine.follow(text));
    auto const follows = [&](Uses const& uses) {
      chain.micro_step(uses, 1);  // another order would be an error
      engine.discard_gradients();
    };
    std::optional<Scope> scope(engine.follow(text));
    follows(text_uses);
    scope.emplace(engine.follow(image));  // begins before the one that it replaces ends
    follows(image_uses);
    scope.reset();
    follows(all_uses);
    std::optional<Scope> first(engine.follow(text)), second(engine.follow(image)), third(engine.follow({}));
    follows(all_uses);
    first.reset();
    follows(all_uses);
    third.reset();
    follows(image_uses);
    std::optional<Scope> moved(std::move(second));
    second.reset();
    follows(image_uses);
    moved.reset();
    follows(all_uses);
  });
}

TEST_CASE("gradients that wait unreduced are reduced by a later pass that has their units") {
  int const ranks = GENERATE(1, 2, 4);
  for (auto const& strategy : strategies(ranks)) {
    with_towers(ranks, strategy, untouched, [](auto& engine, auto& chain, auto text, auto image, auto&) {
      fsdp::Sgd sgd(engine, {.lr = 0.1f});
      auto const run = [&](fsdp::PathId path, Uses const& uses, std::int64_t number, bool waits) {
        auto const scope = engine.follow(path);
        auto const unreduced = engine.no_sync(waits);
        chain.micro_step(uses, number);
      };
      // The same order of sums: text, image, then all.
      run(text, text_uses, 1, false), run(image, image_uses, 2, false), run({}, all_uses, 3, false);
      auto const reduced = named(engine, true);
      engine.discard_gradients();
      run(text, text_uses, 1, true), run(image, image_uses, 2, true), run({}, all_uses, 3, false);
      auto const waited = named(engine, true);
      for (auto const& [name, values] : waited)
        for (std::size_t i = 0; i < values.size(); ++i)
          RANK_CHECK(std::abs(values[i] - reduced.at(name)[i]) <= 1e-6f * (1 + std::abs(values[i])));
      sgd.step();
      // Text waits, image reduces: the step is refused until a pass reduces text.
      run(text, text_uses, 4, true), run(image, image_uses, 5, false);
      auto const refused = what([&] { sgd.step(); });
      RANK_CHECK(has(refused, "unit 'h.0' has no reduced gradients: they were accumulated without reduction"));
      RANK_CHECK(has(refused, "in a path that has the unit"));
      run(text, text_uses, 6, false);
      sgd.step();
      run({}, all_uses, 7, false);
      sgd.step();
      // Image alone waits: the message names its unit, not those that its path leaves out.
      run(image, image_uses, 8, true);
      RANK_CHECK(has(what([&] { sgd.step(); }), "unit 'h.2' has no reduced gradients: they were accumulated without"));
      engine.discard_gradients();
    });
  }
}

TEST_CASE("a path gathers and reduces its own units alone") {
  with_towers(2, fsdp::FullShard{}, untouched, [](auto& engine, auto& chain, auto text, auto, toy::Tally& tally) {
    fsdp::AdamW adamw(engine);
    auto const scope = engine.follow(text);
    chain.micro_step(text_uses, 1);
    engine.synchronize();
    RANK_CHECK(tally.count("reduce_scatter") == 3);
    for (auto const& entry : tally.entries) RANK_CHECK(entry.unit != "h.2" && entry.unit != "h.3");
    tally.entries.clear();
    adamw.step();
    {
      auto const evaluation = engine.evaluation();
      chain.forward(text_uses, 1);
    }
    RANK_CHECK(tally.count("all_gather", "forward") == 3);
  });
}

TEST_CASE("evaluations, frozen parameters and forgotten passes follow paths") {
  int const ranks = GENERATE(1, 2);
  with_towers(ranks, fsdp::FullShard{}, untouched, [](auto& engine, auto& chain, auto text, auto image, auto&) {
    fsdp::AdamW adamw(engine, {.lr = 0.1f});
    auto const step = [&](fsdp::PathId path, Uses const& uses, std::int64_t number) {
      auto const scope = engine.follow(path);
      chain.micro_step(uses, number);
      adamw.step();
    };
    step(text, text_uses, 1);
    auto const in_text = engine.follow(text);
    chain.forward(text_uses, 2);
    auto const trained = chain.output(text_uses);
    {
      auto const evaluation = engine.evaluation();
      chain.forward(text_uses, 2);
      RANK_CHECK(chain.output(text_uses) == trained);
      auto const in_image = engine.follow(image);
      chain.forward(image_uses, 2);
      RANK_CHECK(chain.output(image_uses) != trained);
    }
    // A forward pass is forgotten by the next one, of any path.
    chain.forward(text_uses, 3);
    {
      auto const declared = engine.follow(fsdp::PathId{});
      chain.micro_step(all_uses, 3);
    }
    auto const gradients = named(engine, true);
    {
      auto const frozen = engine.frozen_parameters();
      auto const in_image = engine.follow(image);
      chain.micro_step(image_uses, 4);
    }
    RANK_CHECK(named(engine, true) == gradients);
    adamw.step();
    chain.micro_step(text_uses, 5);
    engine.discard_gradients();
    RANK_CHECK(has(what([&] { adamw.step(); }), "unit 'h.0' has no reduced gradients"));
    chain.micro_step(text_uses, 5);
    adamw.step();
    RANK_CHECK(engine.account().live(fsdp::MemoryTag::gather) == 0);
  });
}

TEST_CASE("a backward pass follows the path of its forward pass, whatever scope is open") {
  with_towers(2, fsdp::FullShard{}, untouched, [](auto& engine, auto& chain, auto text, auto image, auto&) {
    fsdp::AdamW adamw(engine);
    auto const expected = gradients_of(engine, chain, text, text_uses, 1);
    {
      auto const scope = engine.follow(text);
      chain.forward(text_uses, 1);
    }
    {
      auto const scope = engine.follow(image);
      auto const refused = what<fsdp::OrderError>([&] { auto const use = engine.backward_scope(chain[2]); });
      RANK_CHECK(has(refused,
                     "modules must run in the order of path 'text', which the pass follows: expected backward "
                     "of 'h.4', got backward of 'h.2'"));
      chain.backward(text_uses);
    }
    RANK_CHECK(named(engine, true) == expected);
    adamw.step();
    auto const scope = engine.follow(image);
    auto const refused = what<fsdp::OrderError>([&] { auto const use = engine.forward_scope(chain[0]); });
    RANK_CHECK(has(refused, "path 'image', which the pass follows: expected forward of 'h.2', got forward of 'h.0'"));
    chain.micro_step(image_uses, 2);
    adamw.step();
  });
}

namespace {

/// A declaration with paths.
fsdp::StepInput input_at_random(std::mt19937& random) {
  auto const below = [&](unsigned n) { return static_cast<int>(random() % n); };
  auto const one_in = [&](unsigned n) { return random() % n == 0; };
  auto input = fsdp::testing::equal_units(1 + below(6), 1 << below(3), 1 << below(2));
  for (auto& unit : input.units) {
    unit.elements = 256 * below(5);
    unit.sharded = !one_in(4);
    unit.reshards_after_forward = unit.sharded && !one_in(4);
    unit.hooked = one_in(3), unit.sets_gradients = one_in(2), unit.padded = one_in(2), unit.frozen = one_in(4);
    if (one_in(3)) unit.types = {fsdp::DType::bf16, fsdp::DType::bf16, fsdp::DType::f32};
  }
  input.units.front().elements = 512, input.units.front().frozen = false;
  if (one_in(2)) input.uses.push_back(random() % input.units.size());
  input.allow_no_sync = one_in(2), input.allow_no_replica_sync = one_in(2), input.allow_keep_unsharded = one_in(3);
  input.allow_frozen_parameters = one_in(3), input.keep_last = one_in(2), input.keep_root = one_in(2);
  input.zeros_for_absent = one_in(2);
  input.offload.moments = one_in(3), input.offload.gradients = !input.zeros_for_absent && one_in(3);
  input.bucket_bytes = one_in(2) ? 0 : 4 * (256 + below(2000)), input.first_bucket_bytes = 512;
  if (one_in(3)) input.max_ahead_bytes = 1 + below(9000);
  if (input.shards == 4 && one_in(2) && !input.allow_keep_unsharded) input.reshard_ranks = 2;
  if (one_in(4)) input.wire = fsdp::DType::bf16;
  input = fsdp::testing::with_prefetch(std::move(input), below(4), below(4));
  fsdp::UseOrder declared;
  for (auto const unit : input.uses) declared.declare(unit, "");
  input.paths = fsdp::detail::FixedArray<fsdp::StepPath>(1 + random() % 3);
  for (std::size_t path = 0; path < input.paths.size(); ++path) {
    auto& of = input.paths[path];
    of.name = "p" + std::to_string(path);
    for (auto more = 1 + below(6); more > 0; --more) of.uses.push_back(random() % input.uses.size());
    of.prefetch = prefetch_by_depth(fsdp::UseOrder(declared, of.name, of.uses), below(4), below(4));
  }
  return input;
}
void check_programs(unsigned seed, int programs) {
  std::mt19937 random(seed);
  std::size_t conditions = 0, found = 0;
  for (int i = 0; i < programs; ++i) {
    auto const input = input_at_random(random);
    auto program = compile_program(input);
    auto const problem = check_program(program, input);
    INFO("seed " << seed << ", program " << i << ": " << problem << "\n" << to_text(program));
    REQUIRE(problem.empty());
    // The declared order has the turns of a program without paths.
    auto plain = input;
    plain.paths = {};
    auto const declared = compile_program(plain);
    for (auto const kind : fsdp::pass_kinds) {
      CHECK((count(program, kind, fsdp::plain_step).all_gather == count(declared, kind, fsdp::plain_step).all_gather));
      CHECK((count(program, kind, fsdp::plain_step).all_reduce == count(declared, kind, fsdp::plain_step).all_reduce));
    }
    // Without the conditions on contents, some micro-step opens a slot whose gradients wait, or adds no sum.
    bool some = false;
    program.for_each([&](fsdp::step::Operation& operation) {
      some = some || operation.condition == fsdp::step::Condition::none_waits;
      operation.condition = fsdp::step::Condition::always;
    });
    conditions += some ? 1u : 0u;
    found += some && !check_program(program, input).empty() ? 1u : 0u;
  }
  CHECK(conditions > 0);
  CHECK(found == conditions);
}

}  // namespace

TEST_CASE("in programs of paths at random, every reader finds what it needs") {
  check_programs(1, fsdp::testing::sanitized ? 100 : 400);
}

TEST_CASE("in many more programs of paths at random, every reader finds what it needs", "[.][paths]") {
  for (unsigned seed = 2; seed < 12; ++seed) check_programs(seed, 2000);
}

TEST_CASE("a printed step names its paths") {
  auto input = fsdp::testing::equal_units(3, 2);
  input.allow_no_sync = true;
  input.paths = fsdp::detail::FixedArray<fsdp::StepPath>(1);
  input.paths[0] = {"outer", {0, 2}, {}};
  auto const text = to_text(fsdp::compile_program(input));
  CHECK(has(text, "path 'outer':\nforward    0 | all-gather u0->A"));
  CHECK(has(text, "open u2->own if nothing of it waits"));
}

TEST_CASE("wrong paths are refused by name, and change nothing") {
  fsdp::local::run(1, Device{}, [&](Local local) {
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{}), other(mesh, fsdp::FullShard{});
    Chain chain(engine), others(other);
    for (std::size_t i = 0; i < depth; ++i) {
      chain.add(i, false, engine.add_unit(chain.name(i)));
      others.add(i, false, other.add_unit(chain.name(i)));
    }
    auto const add = [&](std::string_view name, std::vector<fsdp::UseId> const& uses) {
      return what([&] { engine.add_path(name, uses); });
    };
    auto const text = engine.add_path("text", chain.ids({0, 4}));
    CHECK(has(add("text", chain.ids({1})), "add_path: the engine already has a path 'text'"));
    CHECK(has(add("", chain.ids({1})), "add_path: a path needs a name"));
    CHECK(has(add("none", {}), "add_path: the path 'none' has no uses"));
    CHECK(has(add("far", {{5}}), "there is no use 5"));
    CHECK(has(add("empty id", {chain[0], fsdp::UseId{}}), "a use id names no module"));
    CHECK(has(what([&] { engine.recompute_segment(fsdp::UseId{}, chain[1]); }), "a use id names no module"));
    CHECK(has(what([&] { chain.add(0, false, fsdp::UnitId{}); }), "module 'h.0': the engine has no such unit"));
    CHECK(has(add("foreign", {others[0]}), "a use id belongs to another engine"));
    CHECK(has(what([&] { auto const scope = engine.follow({2}); }), "there is no path 2"));
    CHECK(has(what([&] { auto const scope = other.follow(text); }), "a path id belongs to another engine"));
    // Segments are whole or left out, whichever is declared first.
    CHECK(has(what([&] { engine.recompute_segment(chain[3], chain[4]); }),
              "the path 'text' has a part of the segment 'h.3' to 'h.4' alone"));
    engine.recompute_segment(chain[1], chain[2]);
    CHECK(has(add("part", chain.ids({0, 1, 3})), "the path 'part' has a part of the segment 'h.1' to 'h.2' alone"));
    CHECK(has(add("turned", chain.ids({2, 1})), "the path 'turned' has a part of the segment 'h.1' to 'h.2' alone"));
    CHECK(has(add("twice", chain.ids({1, 2, 1, 2})), "the path 'twice' repeats the segment 'h.1' to 'h.2'"));
    CHECK(engine.plan_input().paths.size() == 1);
    fsdp::Sgd sgd(engine);
    CHECK(has(add("late", chain.ids({0})), "path 'late' was added too late"));
    {
      auto const scope = engine.follow(text);
      {
        auto const use = engine.forward_scope(chain[0]);
        CHECK(has(what([&] { auto const inner = engine.follow({}); }), "but forward of 'h.0' has not ended"));
      }
      CHECK(has(what([&] { auto const inner = engine.follow({}); }),
                "but a forward pass is incomplete. Complete it ('h.4' comes next), or call discard_gradients()"));
      { auto const last = engine.forward_scope(chain[4]); }
      { auto const last = engine.backward_scope(chain[4]); }
      CHECK(has(what([&] { auto const inner = engine.follow({}); }),
                "a backward pass is incomplete: units that have their gradients: 'h.4'; units without: 'h.0'"));
      { auto const first = engine.backward_scope(chain[0]); }
    }
    // No rule is chosen for units without gradients.
    CHECK(has(what([&] { sgd.step(); }),
              "an optimizer step begins, but unit 'h.1' has no reduced gradients: all backward passes since the last "
              "step followed paths that leave it out; choose EngineOptions::without_gradient"));
    CHECK(has(what([&] { static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f)); }), "unit 'h.1' has no reduced"));
    chain.forward(all_uses, 1);
    engine.discard_gradients();
  });
}

namespace {

/// Sets the gradient of its tensor to 2.
struct Setter {
  static constexpr bool sets_gradients = true;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {5});
  }
  template <class W>
  void forward(fsdp::host::Stream&, Params<W> const&) const {}
  template <class W, class G>
  void backward(fsdp::host::Stream& stream, Params<W> const&, Params<G> const& g) const {
    stream.enqueue([g] {
      for (int i = 0; i < 5; ++i) g.w.data[i] = 2.0f + (g.w.fresh ? 0.0f : g.w.data[i]);
    });
  }
};

}  // namespace

TEST_CASE("tensors of a unit that a path does not use have a gradient of zeroes, though modules begin sums") {
  int const ranks = GENERATE(1, 2);
  for (auto const& strategy : strategies(ranks)) {
    fsdp::local::run(ranks, Device{}, [&](Local local) {
      auto tally = std::make_shared<toy::Tally>();
      fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
      fsdp::Engine<Comm> engine(mesh, strategy, untouched);
      auto const unit = engine.add_unit("both");
      auto a = engine.shard(Setter{}, "a", unit), between = engine.shard(Setter{}, "between"),
           b = engine.shard(Setter{}, "b", unit);
      auto const path = engine.add_path("a", {a, between});
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      auto const first = [&] { a.forward(), between.forward(); };
      auto const whole = [&] { first(), b.forward(), b.backward(), between.backward(), a.backward(); };
      auto const gradient = [&](std::string const& name) {
        auto const all = named(engine, true);
        return all.empty() ? -1.0f : all.at(name)[3];
      };
      auto const expect = [&](float of_a, float of_b) {
        auto const found_a = gradient("a.w"), found_b = gradient("b.w");
        if (engine.rank() == 0) RANK_CHECK(found_a == of_a && found_b == of_b);
      };
      for (int step = 0; step < 3; ++step) {
        whole(), expect(2, 2), sgd.step();
        {
          auto const scope = engine.follow(path);
          first(), between.backward(), a.backward();
          expect(2, 0);
          first(), between.backward(), a.backward();
          expect(4, 0);
        }
        whole(), expect(6, 2), sgd.step();
      }
    });
  }
  CHECK_RANKS();
}

namespace {

/// A tensor that does not train.
struct Frozen : Setter {
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {5}, fsdp::TensorOptions{.frozen = true});
  }
};

}  // namespace

TEST_CASE("a path gives a unit a gradient if it uses one of its modules that trains, wherever another one lies") {
  for (auto const& strategy : strategies(2)) {
    fsdp::local::run(2, Device{}, [&](Local local) {
      fsdp::Mesh<Comm> mesh(Comm(std::move(local), std::make_shared<toy::Tally>()));
      fsdp::Engine<Comm> engine(mesh, strategy, untouched);
      auto const unit = engine.add_unit("both");
      auto trains = engine.shard(Setter{}, "trains", unit);
      auto trunk = engine.shard(Setter{}, "trunk");
      auto frozen = engine.shard(Frozen{}, "frozen", unit);
      auto const above = engine.add_path("above", {trunk, frozen}), below = engine.add_path("below", {frozen, trunk}),
                 among = engine.add_path("among", {frozen, trains, frozen});
      fsdp::Sgd sgd(engine, {.lr = 1.0f, .weight_decay = 0.5f});
      auto const shards = engine.shards();
      auto const before = named(engine, false);
      auto const expect = [&](bool has_gradient) {
        RANK_CHECK(shards.has_gradient(shards[unit]) == has_gradient);
        sgd.step();
        auto const now = named(engine, false);
        if (engine.rank() == 0) RANK_CHECK((now.at("trains.w") == before.at("trains.w")) == !has_gradient);
      };
      {
        auto const scope = engine.follow(above);
        trunk.forward(), frozen.forward(), frozen.backward(), trunk.backward();
        expect(false);
      }
      {
        auto const scope = engine.follow(below);
        frozen.forward(), trunk.forward(), trunk.backward();
        expect(false);
      }
      auto const scope = engine.follow(among);
      frozen.forward(), trains.forward(), frozen.forward(), frozen.backward(), trains.backward();
      expect(true);
    });
  }
  CHECK_RANKS();
}

TEST_CASE("zeroes for units without gradients are refused while gradients are offloaded") {
  fsdp::EngineOptions const options{.without_gradient = fsdp::WithoutGradient::zeros};
  with_towers(1, fsdp::FullShard{}, options, [](auto& engine, auto&, auto, auto, auto&) {
    fsdp::offload(engine, {.gradients = true});
    RANK_CHECK(has(what([&] { engine.seal(); }),
                   "units without a gradient cannot get zeroes while gradients are "
                   "offloaded"));
  });
}

TEST_CASE("an update of a unit without a gradient is refused, and a half step names its own units") {
  with_towers(1, fsdp::FullShard{}, untouched, [](auto& engine, auto& chain, auto text, auto, auto&) {
    auto const shards = engine.shards();
    shards.attach_optimizer();
    RANK_CHECK(has(what([&] { shards.begin_step("own", 1.0f); }), "unit 'h.0' has no reduced gradients"));
    auto const scope = engine.follow(text);
    chain.micro_step(text_uses, 1);
    RANK_CHECK(shards.has_gradient(shards[0]) && !shards.has_gradient(shards[2]));
    shards.begin_step("own", 1.0f);
    RANK_CHECK(has(what([&] { auto const update = shards.update(shards[2]); }), "or has no gradient"));
    { auto const update = shards.update(shards[0]); }
    RANK_CHECK(has(what([&] { chain.forward(text_uses, 2); }),
                   "an optimizer step is incomplete: units updated: 'h.0'; not updated: 'h.1', 'h.4'"));
    { auto const update = shards.update(shards[1]); }
    { auto const update = shards.update(shards[4]); }
    chain.micro_step(text_uses, 2);
  });
}

TEST_CASE("backward of a path in which nothing trains is refused by name; its forward and activations run") {
  fsdp::local::run(2, Device{}, [&](Local local) {
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{}, untouched);
    Chain chain(engine);
    for (std::size_t i = 0; i < depth; ++i)
      chain.add(i, false, engine.add_unit(chain.name(i), fsdp::UnitOptions{.frozen = i < 2}));
    auto const frozen = engine.add_path("frozen", chain.ids({0, 1}));
    auto const upper = engine.add_path("upper", chain.ids({3, 0, 2}));
    fsdp::AdamW adamw(engine);
    {
      auto const scope = engine.follow(frozen);
      chain.forward({0, 1}, 1);
      RANK_CHECK(has(what([&] {
                       chain.backward({0, 1});
                     }),
                     "backward of 'h.1': nothing trains in path 'frozen', so its passes have no backward"));
      auto const activations = engine.frozen_parameters();
      chain.backward({0, 1});
    }
    auto const scope = engine.follow(upper);
    chain.micro_step({3, 0, 2}, 2);
    adamw.step();
    RANK_CHECK(engine.program().backward_end() == 2 && engine.program().backward_end(1) == 2 &&
               engine.program().backward_end(2) == 0);
    expect_as_planned(engine);
  });
  CHECK_RANKS();
}

TEST_CASE("ranks that declare or follow different paths get an error on all ranks") {
  std::vector<std::string> texts(2), followed(2);
  fsdp::local::run(2, Device{}, [&](Local local) {
    auto const rank = static_cast<std::size_t>(local.rank());
    auto tally = std::make_shared<toy::Tally>();
    fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
    fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{});
    Chain chain(engine);
    for (std::size_t i = 0; i < depth; ++i) chain.add(i, false, engine.add_unit(chain.name(i)));
    engine.add_path("text", chain.ids(rank == 0 ? Uses{0, 4} : Uses{0, 3}));
    texts[rank] = what<fsdp::ConfigError>([&] { engine.seal(); });
  });
  for (auto const& text : texts) {
    CHECK(has(text, "path 'text' of uses 0 'h.0' 4 'h.4'"));
    CHECK(has(text, "path 'text' of uses 0 'h.0' 3 'h.3'"));
  }
  for (std::string const differ : {"path", "order"}) {  // with other modules, or with the same ones
    try {
      fsdp::local::run(2, Device{}, [&](Local local) {
        auto const rank = static_cast<std::size_t>(local.rank());
        auto tally = std::make_shared<toy::Tally>();
        fsdp::Mesh<Comm> mesh(Comm(std::move(local), tally));
        fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{}, untouched);
        Chain chain(engine);
        for (std::size_t i = 0; i < depth; ++i) chain.add(i, false, engine.add_unit(chain.name(i)));
        Uses const same{0, 1, 4};
        auto const text = engine.add_path("text", chain.ids(same));
        auto const image = engine.add_path("image", chain.ids(differ == "path" ? image_uses : same));
        fsdp::AdamW adamw(engine);
        auto const scope = engine.follow(rank == 0 ? text : image);
        followed[rank] = what<fsdp::Error>([&] {
          chain.micro_step(rank == 0 || differ == "order" ? same : image_uses, 1);
          engine.synchronize();
        });
        throw fsdp::Error(followed[rank]);
      });
      FAIL("nothing was thrown");
    } catch (fsdp::Error const&) {
    }
    for (auto const& text : followed) {
      INFO(text);
      CHECK(has(text, "path 'text'"));
      CHECK(has(text, "path 'image'"));
    }
  }
}
