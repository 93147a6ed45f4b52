// SPDX-License-Identifier: Apache-2.0
// The owner above the units: mesh, streams, communicators, buffers, order, account.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/engine_text.hpp"
#include "fsdp/error.hpp"
#include "fsdp/flat_param.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/memory_plan.hpp"
#include "fsdp/mesh.hpp"
#include "fsdp/precision.hpp"
#include "fsdp/reducer.hpp"
#include "fsdp/schedule.hpp"
#include "fsdp/shard_storage.hpp"
#include "fsdp/sharded_module.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/trace.hpp"
#include "fsdp/unsharder.hpp"
#include "fsdp/use_scope.hpp"

namespace fsdp {

/// One engine per rank and model. Modules register in forward order; the first use, optimizer or export seals the
/// engine: layouts and order are compared over all ranks, everything is allocated, and the shards are initialised.
///
/// @tparam S  strategy    @tparam C  communicator    @tparam P  precision policy
/// @note Collective: construction, sealing, and everything that moves parameters or gradients.
template <Strategy S, Communicator C, class P = Fp32>
class Engine {
 public:
  using ShardingStrategy = S;
  using Comm = C;
  using Precision = P;
  using Device = typename C::Device;
  using Stream = typename Device::Stream;
  using Unit = FlatParam<Device, P>;
  using Param = typename P::Param;
  using Reduce = typename P::Reduce;
  using Master = typename P::Master;

  /// Computes on a stream of its own.
  explicit Engine(Mesh<C>& mesh, EngineOptions options = {}) : Engine(mesh, options, nullptr) {}
  /// Computes on the caller's stream, which must outlive the engine.
  Engine(Mesh<C>& mesh, EngineOptions options, Stream& compute) : Engine(mesh, options, &compute) {}

  Engine(Engine&&) = delete;
  ~Engine() {
    for (auto* stream : {&gather_.stream(), compute_, &reduce_.stream()}) drain(*stream);
    if (reduce_.replicate_stream()) drain(*reduce_.replicate_stream());
  }

  Device const& device() const { return device_; }
  Stream& compute() { return *compute_; }
  int rank() const { return where_.rank; }
  int world_size() const { return where_.world; }
  Placement const& placement() const { return where_; }
  EngineOptions const& options() const { return options_; }
  MemoryAccount& account() { return account_; }
  bool sealed() const { return sealed_; }

  /// Makes an empty unit that several modules will share; it is held from its first use to its last.
  UnitId add_unit(std::string_view unit_name) {
    FSDP_EXPECTS(!sealed_, "rank {}: unit '{}' comes after the engine was sealed", rank(), unit_name);
    for (auto const& unit : units_)
      FSDP_EXPECTS(unit->name() != unit_name, "rank {}: there is a unit '{}' already", rank(), unit_name);
    units_.push_back(std::make_unique<Unit>(device_, std::string(unit_name)));
    return {units_.size() - 1};
  }

  /// Registers `user_module` as the next in forward order, with a unit of its own. Tensor names become "prefix.name".
  template <Module M>
  ShardedModule<M, Engine> shard(M user_module, std::string_view prefix) {
    return shard(std::move(user_module), prefix, add_unit(prefix));
  }
  /// Registers `user_module` as the next in forward order, in a unit that it shares. A full tensor name that the unit
  /// has already is the same storage (a tied parameter): reduced once, after its last backward use.
  template <Module M>
  ShardedModule<M, Engine> shard(M user_module, std::string_view prefix, UnitId unit) {
    FSDP_EXPECTS(!sealed_, "rank {}: module '{}' comes after the engine was sealed", rank(), prefix);
    std::vector<std::size_t> tensors;
    typename M::template Params<float> unbound;
    user_module.describe(unbound, detail::Registrar{prefix, &units_[unit.index]->layout(), &tensors});
    return {*this, std::move(user_module), schedule_.declare(unit.index, std::string(prefix)), std::move(tensors)};
  }
  /// Registers modules in turn, each with a unit of its own: "prefix.0", "prefix.1", ...
  template <Module M>
  std::vector<ShardedModule<M, Engine>> shard(std::vector<M> modules, std::string_view prefix) {
    std::vector<ShardedModule<M, Engine>> sharded;
    sharded.reserve(modules.size());
    for (std::size_t i = 0; i < modules.size(); ++i)
      sharded.push_back(shard(std::move(modules[i]), fmt::format("{}.{}", prefix, i)));
    return sharded;
  }
  /// Registers the next use of a unit whose layout the caller fills itself (AdoptedUnit). @return the use's index
  std::size_t declare_use(UnitId unit, std::string_view module) {
    return schedule_.declare(unit.index, std::string(module));
  }

  /// Compares layouts over ranks, allocates everything, initialises the shards. Implied by the first use.
  /// @throws ConfigError on every rank if ranks disagree, naming the first difference
  /// @note Collective: yes.
  void seal() {
    if (sealed_) return;
    FSDP_EXPECTS(schedule_.size() > 0, "rank {}: the engine has no modules", rank());
    for (std::size_t u = 0; u < units_.size(); ++u) {
      units_[u]->seal(where_);
      FSDP_EXPECTS(used(u), "rank {}: no module uses unit '{}'", rank(), units_[u]->name());
    }
    detail::expect_equal_texts(mesh_->world(), text());
    for (std::size_t use = 0; use < schedule_.size(); ++use)
      if (!schedule_.shared(use)) last_pooled_use_ = use;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      auto& unit = *units_[u];
      if (!gather_.direct() && (held(u) || !S::reshards_after_forward))
        gather_.add_own_slot(unit, static_cast<std::size_t>(slot_bytes(unit.full_numel(), sizeof(Param))));
      if (!reduce_.direct() && (held(u) || options_.accumulate_unsharded))
        reduce_.add_own_slot(unit, static_cast<std::size_t>(slot_bytes(unit.full_numel(), sizeof(Reduce))));
    }
    storage_.allocate(mesh_->world(), units_, where_, fsdp::memory_plan(plan_input()), gather_, reduce_);
    auto completion_order = storage_.place_shards(units_, schedule_);
    if (reduce_.direct())
      reduce_.set_buckets(std::move(completion_order), storage_.gradients(),
                          S::shards_parameters ? 0 : options_.bucket_bytes, options_.first_bucket_bytes);
    reduce_.prepare();
    storage_.initialize(units_, options_.seed, *compute_);
    for (auto& unit : units_) mark_written(*unit);
    sealed_ = true;
  }

  /// The plan that sealing follows, from the layouts registered so far.
  MemoryPlanInput plan_input() const {
    MemoryPlanInput input;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      auto const alignment = layout_alignment * where_.world;
      auto const& tensors = units_[u]->layout().tensors();
      auto const end = tensors.empty() ? 0 : tensors.back().range().end;
      input.units.push_back({align_up(end, alignment), held(u)});
    }
    input.world = where_.world;
    input.shards = where_.shards;
    input.reshards_after_forward = S::reshards_after_forward;
    input.accumulate_unsharded = options_.accumulate_unsharded;
    input.prefetch = options_.prefetch;
    input.param_bytes = sizeof(Param);
    input.reduce_bytes = sizeof(Reduce);
    input.master_bytes = sizeof(Master);
    input.param_is_master = std::is_same_v<Param, Master>;
    input.reduce_is_master = std::is_same_v<Reduce, float>;
    return input;
  }

  std::size_t unit_count() const { return units_.size(); }
  Unit& unit(std::size_t index) { return *units_[index]; }
  Unit& unit(UnitId id) { return *units_[id.index]; }
  FlatLayout const& layout(std::size_t use) const { return units_[schedule_.unit(use)]->layout(); }
  std::size_t bucket_count() const { return reduce_.bucket_count(); }

  /// Whether the next backward passes reduce their gradients. Read when a module's backward begins; without, gradients
  /// gather unreduced in each rank's slots until a backward pass that reduces.
  /// @throws UsageError if the slots were not declared (EngineOptions::accumulate_unsharded) and gradients are sharded
  void set_gradient_sync(bool on) {
    FSDP_EXPECTS(on || reduce_.direct() || options_.accumulate_unsharded,
                 "rank {}: gradients can wait unreduced only with EngineOptions::accumulate_unsharded", rank());
    gradient_sync_ = on;
  }

  using Evaluation = EvaluationScope<Engine>;
  using Scope = UseScope<Engine>;
  /// @return while it lives, forward passes keep nothing for a backward pass
  Evaluation evaluation() { return Evaluation(*this); }
  /// @return while it lives, the use's full parameters (and in backward its gradients) are there
  Scope forward_scope(std::size_t use) { return Scope(*this, use, Pass::forward); }
  Scope backward_scope(std::size_t use) { return Scope(*this, use, Pass::backward); }

  /// Forgets a pass under way: every unit is dropped, the next use starts a new forward pass.
  void abandon_pass() {
    schedule_.reset();
    for (auto& unit : units_) gather_.reshard(*unit, *compute_);
  }

  /// An optimizer will read the gradient shards: seals the engine.
  void attach_optimizer() {
    seal();
    storage_.lease_gradients();
  }
  /// An optimizer step begins: nothing that was gathered before it is used again.
  void begin_optimizer_step() { abandon_pass(); }
  /// Makes compute wait until the unit's gradient shard is complete.
  /// @throws UsageError if no backward pass has reduced into it since the last optimizer step
  void wait_for_reduce(Unit& unit) {
    FSDP_EXPECTS(!unit.fresh && unit.full_gradient == nullptr,
                 "rank {}: unit '{}' has no reduced gradients to step with", rank(), unit.name());
    if (unit.reduce_pending) device_.wait(*compute_, unit.reduced, WaitSite::optimizer_reduced);
    unit.reduce_pending = false;
  }
  /// The optimizer has enqueued the unit's update on compute: its next gather waits for this one only.
  void mark_updated(Unit& unit) {
    mark_written(unit);
    unit.fresh = true;
  }
  /// Compute has enqueued a write of the unit's master shard.
  void mark_written(Unit& unit) {
    device_.record(unit.updated, *compute_);
    unit.update_pending = true;
  }

  /// The clip factor that the next optimizer step multiplies gradients by, in device memory; nullptr: none.
  float const* take_clip_factor() { return std::exchange(clip_factor_, nullptr); }
  void set_clip_factor(float const* factor) { clip_factor_ = factor; }
  NormState& norm_state() { return storage_.norm(); }
  C& scalar_communicator() { return scalar_comm_; }
  C& world() { return mesh_->world(); }
  Unsharder<C, P>& unsharder() { return gather_; }

  /// Records a span for every gather, forward, backward, reduction and optimizer update from now on, up to `capacity`
  /// spans.
  void start_trace(std::size_t capacity) {
    synchronize();
    tracer_ = std::make_unique<Tracer<Device>>(device_, account_, capacity);
    gather_.set_tracer(tracer_.get());
    reduce_.set_tracer(tracer_.get());
  }
  /// Waits for all streams and returns the spans since start_trace or the last collection. @pre start_trace was called
  std::vector<TraceSpan> collect_trace() {
    FSDP_EXPECTS(tracer_ != nullptr, "rank {}: no trace was started", rank());
    synchronize();
    return tracer_->collect(*compute_);
  }
  /// For optimizers: nullptr while nothing is traced.
  Tracer<Device>* tracer() { return tracer_.get(); }

  /// Every rank's mean of `values`, in a fixed order. @note Collective: yes; blocks the calling thread.
  std::vector<double> mean_over_ranks(std::vector<double> const& values) {
    return detail::mean_over_ranks(mesh_->world(), values);
  }

  /// For destructors: waits until compute has run dry, and reports instead of throwing.
  void drain_compute() noexcept { drain(*compute_); }

  /// Waits until all streams of this rank have run dry.
  void synchronize() {
    device_.synchronize(gather_.stream());
    device_.synchronize(*compute_);
    device_.synchronize(reduce_.stream());
    if (reduce_.replicate_stream()) device_.synchronize(*reduce_.replicate_stream());
  }

 private:
  friend UseScope<Engine>;
  friend EvaluationScope<Engine>;

  Engine(Mesh<C>& mesh, EngineOptions options, Stream* compute)
      : mesh_(&mesh),
        options_(options),
        device_(mesh.device()),
        where_(place(mesh)),
        schedule_(where_.rank),
        scalar_comm_(mesh.world().split(0, where_.rank)),
        owned_compute_(compute == nullptr
                           ? std::optional<Stream>(device_.make_stream("compute", StreamPriority::normal))
                           : std::nullopt),
        compute_(compute == nullptr ? &*owned_compute_ : compute),
        gather_(device_, mesh.world().split(where_.replica, where_.rank), where_, account_),
        reduce_(device_, mesh.world().split(where_.replica, where_.rank), mesh.world().split(where_.shard, where_.rank),
                where_, account_) {
    if (options.prefetch < 0)
      fail<ConfigError>("rank {}: prefetch must not be negative, got {}", rank(), options.prefetch);
    if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0)
      fail<ConfigError>("rank {}: bucket sizes must be positive, got {} and {} bytes", rank(), options.bucket_bytes,
                        options.first_bucket_bytes);
  }

  static Placement place(Mesh<C> const& mesh) {
    auto const shards = mesh.template shard_ranks<S>();
    return {mesh.rank(), mesh.size(), mesh.rank() % shards, shards, mesh.rank() / shards, mesh.size() / shards};
  }
  bool used(std::size_t unit_index) const {
    for (std::size_t use = 0; use < schedule_.size(); ++use)
      if (schedule_.unit(use) == unit_index) return true;
    return false;
  }
  bool held(std::size_t unit_index) const {
    for (std::size_t use = 0; use < schedule_.size(); ++use)
      if (schedule_.unit(use) == unit_index && schedule_.shared(use)) return true;
    return false;
  }

  std::string text() const {
    auto lines = fmt::format("strategy {} over {} ranks, {} a shard group, parameters {}, gradients {}, masters {}\n",
                             S::name, where_.world, where_.shards, fsdp::name(dtype_of<Param>),
                             fsdp::name(dtype_of<Reduce>), fsdp::name(dtype_of<Master>));
    lines += fmt::format(
        "options: prefetch {}, keep_last {}, keep_root {}, accumulate_unsharded {}, buckets {} and {}, seed {}\n",
        options_.prefetch, options_.keep_last, options_.keep_root, options_.accumulate_unsharded,
        options_.first_bucket_bytes, options_.bucket_bytes, options_.seed);
    for (auto const& unit : units_) lines += detail::text_of(unit->name(), unit->layout());
    for (std::size_t use = 0; use < schedule_.size(); ++use)
      lines += fmt::format("use of unit '{}' by module '{}'\n", units_[schedule_.unit(use)]->name(),
                           schedule_.module_name(use));
    return lines;
  }

  // --- one step
  // -------------------------------------------------------------------------------------------------------

  Unit& begin_forward(std::size_t use) {
    seal();
    if (schedule_.begin_forward(use)) {
      for (auto& unit : units_) gather_.reshard(*unit, *compute_);
      gather_.pool().restart();
    }
    auto& unit = *units_[schedule_.unit(use)];
    require_unsharded(unit, "forward");
    for (int ahead = 1; ahead <= options_.prefetch && use + static_cast<std::size_t>(ahead) < schedule_.size(); ++ahead)
      if (!gather_.unshard(*units_[schedule_.unit(use + static_cast<std::size_t>(ahead))], "forward")) break;
    gather_.wait_for_unshard(unit, *compute_);
    return unit;
  }

  void end_forward(std::size_t use) {
    schedule_.end_forward(use);
    if (keeps_after_forward(use)) return;
    gather_.reshard(*units_[schedule_.unit(use)], *compute_);
  }

  bool keeps_after_forward(std::size_t use) const {
    if (schedule_.shared(use) && options_.keep_root) return !evaluating_ || !schedule_.last_use_of_unit(use);
    if (evaluating_ || schedule_.shared(use)) return false;
    return !S::reshards_after_forward || (options_.keep_last && use == last_pooled_use_);
  }

  Unit& begin_backward(std::size_t use) {
    FSDP_EXPECTS(!evaluating_, "rank {}: backward of '{}' inside an evaluation", rank(), schedule_.module_name(use));
    if (schedule_.begin_backward(use)) reduce_.restart();
    storage_.lease_gradients();
    auto& unit = *units_[schedule_.unit(use)];
    require_unsharded(unit, "backward");
    for (int ahead = 1; ahead <= options_.prefetch && use >= static_cast<std::size_t>(ahead); ++ahead)
      if (!gather_.unshard(*units_[schedule_.unit(use - static_cast<std::size_t>(ahead))], "backward")) break;
    gather_.wait_for_unshard(unit, *compute_);
    if (schedule_.last_use_of_unit(use)) reduce_.lease(unit, *compute_);
    return unit;
  }

  void end_backward(std::size_t use) {
    bool const complete = schedule_.end_backward(use);
    auto& unit = *units_[schedule_.unit(use)];
    if (schedule_.first_use_of_unit(use)) {
      gather_.reshard(unit, *compute_);
      if (gradient_sync_) reduce_.reduce(unit, *compute_);
    }
    if (complete) reduce_.finish();
  }

  void require_unsharded(Unit& unit, std::string_view pass) {
    FSDP_EXPECTS(gather_.unshard(unit, pass), "rank {}: unit '{}': no buffer is free", rank(), unit.name());
  }

  void drain(Stream& stream) noexcept {
    try {
      device_.synchronize(stream);
    } catch (std::exception const& error) {
      fmt::print(stderr, "fsdp: rank {}: {}\n", rank(), error.what());
    }
  }

  Mesh<C>* mesh_;
  EngineOptions options_;
  Device device_;
  Placement where_;
  MemoryAccount account_;
  Schedule schedule_;
  std::vector<std::unique_ptr<Unit>> units_;
  ShardStorage<C, P> storage_{device_, account_};
  float const* clip_factor_ = nullptr;
  std::unique_ptr<Tracer<Device>> tracer_;
  C scalar_comm_;
  std::size_t last_pooled_use_ = 0;  ///< the use whose unit is kept into backward
  bool sealed_ = false;
  bool evaluating_ = false;
  bool gradient_sync_ = true;

  std::optional<Stream> owned_compute_;
  Stream* compute_;
  Unsharder<C, P> gather_;
  Reducer<C, P> reduce_;
};

/// Makes an engine with the communicator's types deduced.
template <Strategy S, class P = Fp32, Communicator C>
Engine<S, C, P> make_engine(Mesh<C>& mesh, EngineOptions options = {}) {
  return Engine<S, C, P>(mesh, options);
}

}  // namespace fsdp
