// SPDX-License-Identifier: Apache-2.0
// Engines in all combinations of what they may differ in, and a rank that trains with one of them: it checks at every
// use that the engine does what its program says.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/offload.hpp"
#include "tests/support/all_pairs.hpp"
#include "tests/support/backward_flags.hpp"
#include "tests/support/counting.hpp"

namespace engine_table {

using fsdp::PassKind;
using fsdp::StepFlags;

// Values that rows of the table choose from. If two values cannot be combined, the axis of the later one takes its
// first value.
enum class Engine { full, grad_op, hybrid_full, hybrid_grad_op, replicated };
enum class Units { as_engine, last_replicated, every_second_replicated, some_stay, root_replicated };
enum class Ahead { one, none, two, three, lists, capped };
enum class Keeps { all, not_last, not_root, slices, every_unit };
enum class MicroSteps { reduce, last_reduces, last_replicates, at_random };
enum class Between { nothing, evaluations, discarded_passes, frozen_passes };
enum class Precision { fp32, bf16, bf16_reduce, fp32_in_bf16, bf16_in_fp16 };  ///< "in": what fp32 gradients travel in
/// Further tensors of the modules, in units of their own.
enum class Kinds { none, replicated, frozen, fp32, all };
/// Functions of the caller on reduced gradients.
enum class Hooks { none, every_unit, every_second_unit };
/// Recomputed segments: each block alone, pairs, three in the middle, everything in one segment.
enum class Segments { none, single, pairs, middle, whole };
/// State in host memory. Masters: if they are another copy than the parameters, else moments.
enum class Offload { none, moments, gradients, masters, all };

struct Row {
  Engine engine{};
  Units units{};
  int ranks = 1;
  bool tied = false;  ///< a unit that is used first and last
  Ahead ahead{};
  Keeps keeps{};
  MicroSteps micro_steps{};
  Between between{};
  Precision precision{};
  Kinds kinds{};
  Hooks hooks{};
  Segments segments{};
  Offload offload{};
  // Settings that belong to no axis:
  int setting = 0;              ///< modules that set their gradients: 0: none; 1: all; 2: those of every second unit
  std::int64_t elements = 300;  ///< of the smallest block; others have two or three times as many, and the root two
};
inline fsdp::testing::Axes const axes{5, 5, 4, 2, 6, 5, 4, 4, 5, 5, 3, 5, 5};

inline Row row_of(fsdp::testing::TableRow const& at) {
  return {static_cast<Engine>(at[0]),     static_cast<Units>(at[1]),
          static_cast<int>(at[2]) + 1,    at[3] == 0,
          static_cast<Ahead>(at[4]),      static_cast<Keeps>(at[5]),
          static_cast<MicroSteps>(at[6]), static_cast<Between>(at[7]),
          static_cast<Precision>(at[8]),  static_cast<Kinds>(at[9]),
          static_cast<Hooks>(at[10]),     static_cast<Segments>(at[11]),
          static_cast<Offload>(at[12])};
}
inline fsdp::testing::Table rows_at_random(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  fsdp::testing::Table table(count);
  for (auto& row : table)
    for (auto const size : axes) row.push_back(random() % size);
  return table;
}
inline std::string text(fsdp::testing::TableRow const& at) {
  std::string numbers;
  for (auto const value : at) numbers += std::to_string(value) + ' ';
  return numbers;
}

inline int group_of(int ranks) { return ranks % 2 == 0 ? ranks / 2 : ranks; }
inline bool is_hybrid(Row const& row) {
  return row.engine == Engine::hybrid_full || row.engine == Engine::hybrid_grad_op;
}
inline fsdp::ShardingStrategy resharding(Row const& row, bool reshards) {
  auto const group = group_of(row.ranks);
  if (is_hybrid(row) && reshards) return fsdp::HybridShard<>{.group = group};
  if (is_hybrid(row)) return fsdp::HybridShard<fsdp::ShardGradOp>{.group = group};
  if (reshards) return fsdp::FullShard{};
  return fsdp::ShardGradOp{};
}
inline fsdp::ShardingStrategy strategy_of(Row const& row) {
  if (row.engine == Engine::replicated) return fsdp::NoShard{};
  return resharding(row, row.engine == Engine::full || row.engine == Engine::hybrid_full);
}
/// Strategy of a unit: the root is 0, blocks are 1 to `blocks`.
inline fsdp::ShardingStrategy strategy_of(Row const& row, int unit, int blocks) {
  bool const replicated = (row.units == Units::last_replicated && unit == blocks) ||
                          (row.units == Units::every_second_replicated && unit % 2 == 1) ||
                          (row.units == Units::root_replicated && unit == 0);
  if (replicated) return fsdp::NoShard{};
  if (row.units == Units::some_stay && row.engine != Engine::replicated) return resharding(row, unit % 2 == 0);
  return strategy_of(row);
}

inline bool is_hooked(Row const& row, std::size_t unit) {
  return row.hooks == Hooks::every_unit || (row.hooks == Hooks::every_second_unit && unit % 2 == 1);
}

inline fsdp::EngineOptions options_of(Row const& row) {
  fsdp::EngineOptions options;
  if (row.ahead == Ahead::none) options.prefetch = 0;
  if (row.ahead == Ahead::two) options.prefetch = 2;
  if (row.ahead == Ahead::three || row.ahead == Ahead::capped) options.prefetch = 3;
  if (row.ahead == Ahead::capped) options.max_ahead_bytes = 5000;
  options.keep_last = row.keeps != Keeps::not_last && row.keeps != Keeps::slices;
  options.keep_root = row.keeps != Keeps::not_root;
  auto const shards = is_hybrid(row) ? group_of(row.ranks) : row.ranks;
  if (row.keeps == Keeps::slices && shards == 4 && strategy_of(row).reshards_after_forward) options.reshard_ranks = 2;
  options.allow_keep_unsharded = row.keeps == Keeps::every_unit;
  options.allow_no_sync = row.micro_steps == MicroSteps::last_reduces || row.micro_steps == MicroSteps::at_random;
  options.allow_no_replica_sync = is_hybrid(row) && row.micro_steps >= MicroSteps::last_replicates;
  options.allow_frozen_parameters = row.between == Between::frozen_passes;
  options.bucket_bytes = 3000;
  options.first_bucket_bytes = 700;
  if (row.precision == Precision::fp32_in_bf16) options.reduce_dtype = fsdp::DType::bf16;
  if (row.precision == Precision::bf16_in_fp16) options.reduce_dtype = fsdp::DType::f16;
  return options;
}

[[noreturn]] inline void wrong(std::string const& what) { throw std::logic_error(what); }

/// Looks at what a use finds.
template <class E>
class Watch {
 public:
  explicit Watch(E& engine) : engine_(&engine), rest_(engine.account().live_state()), live_(engine.program()) {}

  /// The bytes in use are what the program has come to.
  void expect_bytes(std::string const& when) const {
    auto const live = engine_->account().live_state() - rest_;
    if (live != live_.bytes())
      wrong(fmt::format("rank {}, {}: {} bytes in use, the program says {}\n{}", engine_->rank(), when, live,
                        live_.bytes(), to_text(engine_->program())));
  }
  /// Called between a use's operations.
  void look(void const* parameters, void const* gradients) {
    expect_bytes(fmt::format("{} of use {}", name(kind_), use_));
    // A use that is recomputed finds its parameters where its backward finds them.
    for (auto const& [buffer, address] : {std::pair(0, parameters), std::pair(recomputes_ ? 2 : 1, gradients)}) {
      auto const [entry, is_new] = addresses_.try_emplace({kind_, use_, buffer}, address);
      if (!is_new && entry->second != address) wrong(fmt::format("{} of use {}: another address", name(kind_), use_));
    }
    ++looks_;
  }
  /// Calls a module as one use of a pass.
  template <class Call>
  void use(PassKind kind, std::size_t use, bool recomputes, StepFlags flags, Call const& call) {
    kind_ = kind, use_ = use, recomputes_ = recomputes;
    auto const& turn = engine_->program().turn(kind, use, recomputes);
    run(turn.before, flags);
    auto const looks = looks_;
    call();
    if (looks_ != looks + 1) wrong("nobody looked");
    run(turn.after, flags);
    expect_bytes(fmt::format("{} of use {} is over", name(kind), use));
  }
  fsdp::detail::LiveBytes& live() { return live_; }

 private:
  void run(std::vector<fsdp::step::Operation> const& operations, StepFlags flags) {
    for (auto const& operation : operations)
      if (operation.runs(flags)) live_.run(operation);
  }
  E* engine_;
  std::int64_t rest_;
  fsdp::detail::LiveBytes live_;
  PassKind kind_{};
  std::size_t use_ = 0;
  bool recomputes_ = false;
  int looks_ = 0;
  std::map<std::tuple<PassKind, std::size_t, int>, void const*> addresses_;
};

/// A call of a rank's run.
struct Call {
  enum class Kind { forward, backward, activations, begin_evaluation, end_evaluation, discard, norm, update };
  Kind kind{};
  std::size_t use = 0;
  fsdp::BackwardFlags flags{};  ///< of a backward pass
  bool recomputes = false;      ///< in a backward pass: the use is recomputed
};

/// Kernels that access a unit's parameters and gradients as a module's do, and change nothing.
struct ReadParameters {
  template <class Block, class W>
  FSDP_HD void operator()(Block const&, std::int64_t, W const*, std::int64_t) const {}
  /// For a recording device.
  template <class Accesses, class W>
  static void access(Accesses& a, W const* w, std::int64_t n) {
    a.read(w, n);
  }
};
struct AddGradients {
  template <class Block, class W, class G>
  FSDP_HD void operator()(Block const&, std::int64_t, W const*, G*, std::int64_t) const {}
  template <class Accesses, class W, class G>
  static void access(Accesses& a, W const* w, G* g, std::int64_t n) {
    a.read(w, n);
    a.read_and_write(g, n);
  }
};
struct SetGradients : AddGradients {
  template <class Accesses, class W, class G>
  static void access(Accesses& a, W const* w, G* g, std::int64_t n) {
    a.read(w, n);
    a.write(g, n);
  }
};

/// Changes a reduced gradient shard.
struct ChangeReduced {
  template <class Block>
  FSDP_HD void operator()(Block const&, std::int64_t, float*, std::int64_t) const {}
  template <class Accesses>
  static void access(Accesses& a, float* g, std::int64_t n) {
    a.read_and_write(g, n);
  }
};

/// A module that looks at what it is given, and accesses it: a kernel for each tensor.
template <class Device>
struct Probe {
  static constexpr bool skips_gradients = true;
  Device device;
  std::int64_t elements;
  bool sets_gradients = false;
  /// There is such a tensor, in a unit of its own.
  bool has_replicated = false, has_frozen = false, has_wide = false;
  std::int64_t further = 0;  ///< elements of each of these
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight, replicated, frozen;
    fsdp::Tensor<fsdp::in_fp32<T>, 1> wide;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {elements});
    if (has_replicated) tensor("replicated", p.replicated, {further}, fsdp::TensorOptions{.strategy = fsdp::NoShard{}});
    if (has_frozen) tensor("frozen", p.frozen, {further}, fsdp::frozen);
    if (has_wide) tensor("wide", p.wide, {further});
  }
  template <class W, class E>
  void forward(typename Device::Stream& stream, Params<W> const& w, Watch<E>& watch) const {
    watch.look(w.weight.data, nullptr);
    for_each_tensor(w, w, [&](auto const& weight, auto const&) { read(stream, weight); });
  }
  template <class W, class G, class E>
  void backward(typename Device::Stream& stream, Params<W> const& w, Params<G> const& g, Watch<E>& watch) const {
    watch.look(w.weight.data, g.weight.data);
    for_each_tensor(w, g, [&](auto const& weight, auto const& gradient) {
      if (!gradient.wanted()) return read(stream, weight);
      if (gradient.fresh)
        device.launch(stream, std::int64_t{1}, SetGradients{}, weight.data, gradient.data, weight.numel());
      else
        device.launch(stream, std::int64_t{1}, AddGradients{}, weight.data, gradient.data, weight.numel());
    });
  }

 private:
  template <class W, class G, class Act>
  void for_each_tensor(W const& w, G const& g, Act const& act) const {
    act(w.weight, g.weight);
    if (has_replicated) act(w.replicated, g.replicated);
    if (has_frozen) act(w.frozen, g.frozen);
    if (has_wide) act(w.wide, g.wide);
  }
  template <class Tensor>
  void read(typename Device::Stream& stream, Tensor const& weight) const {
    device.launch(stream, std::int64_t{1}, ReadParameters{}, weight.data, weight.numel());
  }
};

/// One rank of a row.
/// @tparam C  a toy::Counting
template <class C, class P>
class Rank {
 public:
  using E = fsdp::Engine<C, P>;
  using Module = Probe<typename C::Device>;

  Rank(C comm, std::shared_ptr<toy::Tally> tally, Row const& row)
      : row_(row), tally_(std::move(tally)), mesh_(std::move(comm)), engine_(mesh_, strategy_of(row), options_of(row)) {
    constexpr int blocks = 5;
    auto const& device = engine_.device();
    std::optional<fsdp::UnitId> root;
    if (row.tied) root = engine_.add_unit("root", strategy_of(row, 0, blocks));
    auto const module = [&](int unit, std::int64_t elements) {
      Module probe{device, elements, row.setting > 0 && unit % row.setting == 0};
      auto const has = [&](Kinds kind) { return row.kinds == kind || row.kinds == Kinds::all; };
      probe.has_replicated = has(Kinds::replicated) && strategy_of(row, unit, blocks).shards;
      probe.has_frozen = has(Kinds::frozen);
      probe.further = row.elements;
      probe.has_wide = has(Kinds::fp32) && row.precision != Precision::fp32 && row.precision != Precision::fp32_in_bf16;
      return probe;
    };
    if (row.tied) modules_.push_back(engine_.shard(module(0, 2 * row.elements), "ends", *root));
    for (int i = 1; i <= blocks; ++i)
      modules_.push_back(engine_.shard(module(i, row.elements * (i % 3 + 1)), fmt::format("block.{}", i),
                                       strategy_of(row, i, blocks)));
    if (row.tied) modules_.push_back(engine_.shard(module(0, 2 * row.elements), "ends", *root));
    if (row.ahead == Ahead::lists) {
      engine_.set_forward_prefetch(modules_[0], {modules_[3], modules_[1]});
      engine_.set_forward_prefetch(modules_[1], {});
      engine_.set_backward_prefetch(modules_[4], {modules_[1], modules_[3]});
    }
    auto const shards = engine_.shards();
    for (std::size_t u = 0; u < shards.size(); ++u)
      if (!shards[u].frozen && is_hooked(row, u))
        shards.on_reduced(shards[u], [device](typename C::Device::Stream& stream, std::span<float> gradients) {
          device.launch(stream, std::int64_t{1}, ChangeReduced{}, gradients.data(),
                        static_cast<std::int64_t>(gradients.size()));
        });
    for (auto const& [first, last] : segments()) engine_.recompute_segment(modules_[first], modules_[last]);
    if (row.offload != Offload::none) fsdp::offload(engine_, offloaded());
    sgd_.emplace(engine_, fsdp::SgdOptions{.momentum = offloaded().moments ? 0.5f : 0.0f});
    watch_.emplace(engine_);
    scopes_.emplace(engine_);
  }

  E& engine() { return engine_; }
  /// Calls that train() has made.
  std::vector<Call> const& calls() const { return calls_; }

  void train(int steps = 3) {
    for (int step = 0; step < steps; ++step) {
      if (row_.between == Between::discarded_passes) discard_passes();
      int const micro_steps = row_.micro_steps == MicroSteps::at_random ? 12 : 3;
      for (int micro = 0; micro < micro_steps; ++micro) {
        if (row_.between == Between::evaluations && micro < 2) evaluate(micro == 1);
        if (row_.between == Between::frozen_passes) freeze();
        set_flags(micro + 1 == micro_steps);
        pass(PassKind::forward);
        pass(PassKind::backward);
        facts_ = flags_after(facts_);
      }
      // Measured again, it is written where peers may still read the first.
      if (row_.between == Between::evaluations) static_cast<void>(measure());
      auto const norm = measure();
      sgd_->step(norm);
      calls_.push_back({Call::Kind::update});
      if (offloaded().masters) touch_masters();
      facts_ = fsdp::flags_after(fsdp::plain_step);
      watch_->live().reshard();
      watch_->expect_bytes("between steps");
    }
    auto input = engine_.plan_input();
    input.moments = offloaded().moments ? 1 : 0;
    auto const plan = fsdp::memory_plan(input);
    if (engine_.account().peak_live_state() > plan.live_most)
      wrong(fmt::format("{} bytes in use at most, planned {}", engine_.account().peak_live_state() - plan.rest(),
                        plan.live_most - plan.rest()));
    if (auto const bytes = engine_.account().reserved(fsdp::MemoryTag::offloaded); bytes != plan.host)
      wrong(fmt::format("{} bytes of host memory, planned {}", bytes, plan.host));
    engine_.synchronize();
    if (!tally_->strange.empty())
      wrong(fmt::format("rank {}: {} collectives move memory that their communicator does not know: {}", engine_.rank(),
                        tally_->strange.size(), tally_->strange.front()));
  }

 private:
  /// Segments of uses. The root, which is used first and last, may only be in a segment that has both uses.
  std::vector<std::pair<std::size_t, std::size_t>> segments() const {
    std::size_t const first = row_.tied ? 1 : 0;  // block
    switch (row_.segments) {
      case Segments::none: return {};
      case Segments::single: return {{first, first}, {first + 1, first + 1}, {first + 3, first + 3}};
      case Segments::pairs: return {{first, first + 1}, {first + 3, first + 4}};
      case Segments::middle: return {{first + 1, first + 3}};
      case Segments::whole: return {{0, modules_.size() - 1}};
    }
    return {};
  }
  fsdp::OffloadOptions offloaded() const {
    bool const all = row_.offload == Offload::all, has_masters = !std::is_same_v<typename P::Master, typename P::Param>;
    bool const masters = has_masters && (all || row_.offload == Offload::masters);
    bool const moments = all || row_.offload == Offload::moments || (row_.offload == Offload::masters && !masters);
    return {.moments = moments, .masters = masters, .gradients = all || row_.offload == Offload::gradients};
  }
  /// Reads them where they are, as averages do; then writes them, as imports do.
  void touch_masters() {
    auto const shards = engine_.shards();
    auto const& device = engine_.device();
    auto const for_each = [&](auto const& act) {
      for (std::size_t u = 0; u < shards.size(); ++u)
        if (shards[u].trains()) act(shards[u]);
    };
    for_each([&](auto& unit) {
      shards.order_read(unit);
      unit.with_master([&](auto const* master) {
        device.launch(engine_.compute(), std::int64_t{1}, ReadParameters{}, master, unit.shard_numel());
      });
    });
    for_each([&](auto& unit) {
      auto const writing = shards.write(unit);
      unit.with_master([&](auto* master) {
        if constexpr (std::is_same_v<decltype(master), float*>)
          device.launch(engine_.compute(), std::int64_t{1}, ChangeReduced{}, master, unit.shard_numel());
      });
    });
  }
  fsdp::GradNorm<E> measure() {
    calls_.push_back({Call::Kind::norm});
    return fsdp::clip_grad_norm(engine_, 1.0f);
  }
  void set_flags(bool last) {
    fsdp::BackwardFlags flags;
    auto const drawn = [this] { return random_() % 2 == 0; };
    if (!last && row_.micro_steps == MicroSteps::last_reduces) flags.gradient_sync = false;
    if (!last && row_.micro_steps == MicroSteps::last_replicates) flags.replica_sync = false;
    if (!last && row_.micro_steps == MicroSteps::at_random) flags = {drawn(), drawn(), drawn()};
    if (row_.micro_steps == MicroSteps::at_random) flags.reshard = drawn();
    auto const input = engine_.plan_input();
    auto const allowed = [&](fsdp::BackwardFlags one) {
      return missing_option(engine_.program(), input, one).option.empty();
    };
    if (!allowed({true, flags.replica_sync, true})) flags.replica_sync = true;
    if (!allowed({true, true, flags.reshard})) flags.reshard = true;
    scopes_->no_sync(!flags.gradient_sync);
    scopes_->no_replica_sync(!flags.replica_sync);
    scopes_->keep_unsharded(!flags.reshard);
    facts_ = facts_ | flags.step_flags();
    flags_ = flags;
  }
  void use(PassKind kind, std::size_t at, bool recomputes = false) {
    bool const in_forward = kind == PassKind::forward || kind == PassKind::evaluation;
    calls_.push_back({in_forward                   ? Call::Kind::forward
                      : kind == PassKind::backward ? Call::Kind::backward
                                                   : Call::Kind::activations,
                      at, flags_, recomputes});
    watch_->use(kind, at, recomputes, facts_, [&] {
      if (recomputes) {
        modules_[at].recompute(*watch_);
      } else if (!in_forward) {
        modules_[at].backward(*watch_);
      } else {
        modules_[at].forward(*watch_);
      }
    });
  }
  void pass(PassKind kind) {
    tally_->entries.clear();
    turns(kind);
    if (!(toy::counts_of(*tally_) == count(engine_.program(), kind, facts_)))
      wrong(fmt::format("rank {}: {} counts otherwise\n{}", engine_.rank(), name(kind), to_text(engine_.program())));
  }
  /// The turns of a pass. @param most  at most so many
  void turns(PassKind kind, std::size_t most = ~std::size_t{0}) {
    auto const& all = engine_.program().turns(kind);
    for (std::size_t i = 0; i < std::min(most, all.size()); ++i) use(kind, all[i].use, all[i].recomputes());
  }
  /// An evaluation, after a forward pass that it ends or after none.
  void evaluate(bool in_forward) {
    auto const waiting = facts_;
    if (in_forward) use(PassKind::forward, 0), use(PassKind::forward, 1);
    auto const scope = engine_.evaluation();
    calls_.push_back({Call::Kind::begin_evaluation});
    watch_->live().reshard();
    facts_ = fsdp::plain_step;
    pass(PassKind::evaluation);
    calls_.push_back({Call::Kind::end_evaluation});
    facts_ = (waiting & fsdp::waiting_flags) | fsdp::starts_sharded;
  }
  /// A backward pass through activations, which leaves parameters unsharded now and then.
  void freeze() {
    auto const waiting = facts_;
    set_flags(false);
    facts_ = (waiting & ~(fsdp::reshard_flags | fsdp::sync_flags)) | (flags_.step_flags() & fsdp::reshard_flags) |
             fsdp::syncs_all;
    pass(PassKind::forward);
    auto const scope = engine_.frozen_parameters();
    pass(PassKind::frozen_backward);
    facts_ = (flags_after(facts_) & fsdp::start_flags) | (waiting & fsdp::waiting_flags);
  }
  /// Half a forward pass, half a backward pass, and a whole micro-step, of which nothing is left.
  void discard_passes() {
    use(PassKind::forward, 0), use(PassKind::forward, 1);
    discard(true);
    set_flags(false);
    pass(PassKind::forward);
    turns(PassKind::backward, 2);
    discard(true);
    set_flags(false);
    pass(PassKind::forward);
    pass(PassKind::backward);
    facts_ = flags_after(facts_);
    discard(false);
  }
  void discard(bool in_pass) {
    engine_.discard_gradients();
    calls_.push_back({Call::Kind::discard});
    watch_->live().discard();
    if (in_pass) watch_->live().reshard();
    auto const start = in_pass ? fsdp::starts_sharded : facts_ & fsdp::start_flags;
    facts_ = start | fsdp::all_reduced;
    watch_->expect_bytes("discarded");
  }

  Row row_;
  std::shared_ptr<toy::Tally> tally_;
  fsdp::Mesh<C> mesh_;
  E engine_;
  std::vector<fsdp::ShardedModule<Module, E>> modules_;
  std::optional<fsdp::Sgd<E>> sgd_;
  std::optional<Watch<E>> watch_;
  std::optional<fsdp::testing::BackwardScopes<E>> scopes_;
  StepFlags facts_ = fsdp::flags_after(fsdp::plain_step);
  fsdp::BackwardFlags flags_;  ///< of the next backward pass
  std::vector<Call> calls_;
  std::mt19937 random_{7};
};

}  // namespace engine_table
