// SPDX-License-Identifier: Apache-2.0
// Memory of an engine: all buffers that are allocated when it is sealed, and their division among units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/executor.hpp"
#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// State of the gradient norm, in device memory: its shares, their sum over the world, and the results.
struct NormState {
  double* partials = nullptr;  ///< shares of this rank's slices, unit after unit
  double* parts = nullptr;     ///< digits of a sum (kernels::norm_digit_count), or of each rank its largest (world)
  ClipScalars* result = nullptr;
  Ticket ticket{};                    ///< the last all-reduce of `parts`
  float const* loss_scale = nullptr;  ///< scale of the gradients; nullptr: none
  bool scaler_steps = false;          ///< the optimizer is called by the owner of the scale
};

/// Master shards, gradient shards, full-size buffers and scalars of one engine.
template <Communicator C, class P>
class ShardStorage {
 public:
  using D = typename C::Device;
  using Unit = FlatParam<P>;
  using Master = typename P::Master;
  using Units = std::vector<std::unique_ptr<Unit>>;

  ShardStorage(D const& device, MemoryAccount& account) : device_(device), account_(&account) {}

  /// Allocates the memory of `plan`, and gives each unit its part. Full-size buffers are allocated on the world
  /// communicator: every group split from it may then read its peers' parts.
  /// @note Collective: yes.
  [[gnu::cold]] void allocate(C& world, Units& units, Program const& program, MemoryPlan const& plan) {
    std::size_t reduced_bytes = 0, direct_bytes = 0;  // of gradient shards
    std::int64_t partial_elements = 0;
    for (std::size_t u = 0; u < units.size(); ++u) {
      if (!program.units[u].trains()) continue;
      auto const bytes = static_cast<std::size_t>(units[u]->shard_numel()) * sizeof(float);
      if (program.staged_gradients == 0) (program.units[u].writes_shards ? direct_bytes : reduced_bytes) += bytes;
      if (program.units[u].waits_for_replicas) partial_elements += units[u]->shard_numel();
    }
    auto const parameters = plan.parameters - 2 * program.staged_masters;
    master_ = {device_, *account_, MemoryTag::parameters, static_cast<std::size_t>(parameters)};
    auto const accumulator_bytes = static_cast<std::size_t>(program.accumulator_elements) * sizeof(float);
    auto const scratch_bytes = static_cast<std::size_t>(program.scratch_bytes);
    gather_ = {world, *account_, MemoryTag::gather, static_cast<std::size_t>(plan.gather)};
    reduce_ = {world, *account_, MemoryTag::reduce,
               static_cast<std::size_t>(plan.reduce) - accumulator_bytes - scratch_bytes};
    if (direct_bytes > 0) direct_gradients_ = {world, *account_, MemoryTag::gradients, direct_bytes};
    if (reduced_bytes > 0) reduced_gradients_ = {device_, *account_, MemoryTag::gradients, reduced_bytes};
    if (partial_elements > 0)
      partial_ = {world, *account_, MemoryTag::gradients, static_cast<std::size_t>(partial_elements) * sizeof(float)};
    if (scratch_bytes > 0) scratch_ = {device_, *account_, MemoryTag::reduce, scratch_bytes};
    if (accumulator_bytes > 0) accumulators_ = {device_, *account_, MemoryTag::reduce, accumulator_bytes};
    auto const norm_bytes =
        static_cast<std::size_t>(align_up(8 * std::max(world.size(), kernels::norm_digit_count), 256));
    scalars_ = {world, *account_, MemoryTag::scalars, norm_bytes + sizeof(ClipScalars)};
    std::int64_t partials = 0;
    for (auto const& unit : units)
      if (unit->trains()) partials += kernels::norm_partial_count(unit->slice().size());
    norm_partials_ = {device_, *account_, MemoryTag::scalars, static_cast<std::size_t>(partials) * sizeof(double)};
    account_->add_live(MemoryTag::parameters, parameters);
    live_parameters_ = parameters;

    norm_.partials = norm_partials_.template as<double>();
    norm_.parts = scalars_.template as<double>();
    norm_.result = reinterpret_cast<ClipScalars*>(scalars_.data() + norm_bytes);
  }

  /// Gives all memory back: sealing has failed. @pre no stream uses it
  [[gnu::cold]] void release() noexcept {
    account_->add_live(MemoryTag::parameters, -std::exchange(live_parameters_, 0));
    norm_ = {};
    for (auto* const memory : {&master_, &reduced_gradients_, &accumulators_, &scratch_, &norm_partials_}) *memory = {};
    for (auto* const memory : {&gather_, &reduce_, &direct_gradients_, &partial_, &scalars_}) *memory = {};
  }

  /// Registers memory with the communicators that move it, if they model RegistersMemory.
  /// @note Collective: yes, over each of them.
  [[gnu::cold]] void register_memory(Executor<C, P>& executor, std::optional<C>& scalars) {
    using step::Group;
    for (auto const group : {Group::gather, Group::kept}) executor.register_memory(group, gather_);
    executor.register_memory(Group::reduce, reduce_);
    for (auto const group : {Group::replicas, Group::all_replicas})
      for (auto const* memory : {&reduce_, &direct_gradients_, &partial_}) executor.register_memory(group, *memory);
    register_with(scalars, scalars_);
  }

  /// Buffers by slot lie in the order of the program.
  [[gnu::cold]] SlotMemory slots(Program const& program) const {
    SlotMemory memory;
    memory.gradients = direct_gradients_.template as<float>();
    std::byte *gather = gather_.data(), *reduce = reduce_.data();
    auto const place = [&](step::Pool pool, std::byte*& at, std::vector<Slot> const& plans) {
      auto& slots = memory.slots[static_cast<std::size_t>(pool)];
      slots = FixedArray<std::byte*>(plans.size());
      for (std::size_t slot = 0; slot < plans.size(); ++slot) {
        slots[slot] = at;
        at += plans[slot].bytes;
      }
    };
    place(step::Pool::gather, gather, program.gather_slots);
    place(step::Pool::kept_slice, gather, program.kept_slots);
    place(step::Pool::gradient_slot, reduce, program.gradient_slots);
    place(step::Pool::wire, reduce, program.wires);
    return memory;
  }

  /// Master shards lie in declared order; gradient shards as Program::gradient_order says.
  [[gnu::cold]] void place_shards(Units& units, Program const& program) {
    auto* shard = master_.data();
    for (auto& unit : units) {
      unit->shard_data = unit->gathered = shard;
      if (unit->types().master == dtype_of<Master>) unit->master = reinterpret_cast<Master*>(shard);
      shard += static_cast<std::size_t>(unit->shard_numel()) * size_of(unit->gathered_type());
      if (!unit->skips_gradients) unit->scratch_gradient = scratch_.data();
    }
    auto *direct = direct_gradients_.template as<float>(), *reduced = reduced_gradients_.template as<float>();
    auto* partial = partial_.template as<float>();
    auto* accumulator = accumulators_.template as<float>();
    for (auto const index : program.gradient_order) {
      auto& unit = *units[index];
      auto*& gradient = program.units[index].writes_shards ? direct : reduced;
      if (gradient != nullptr) unit.gradient = std::exchange(gradient, gradient + unit.shard_numel());
      if (program.units[index].waits_for_replicas) unit.partial = std::exchange(partial, partial + unit.shard_numel());
      if (program.units[index].accumulates)
        unit.accumulator = std::exchange(accumulator, accumulator + unit.full_numel());
    }
  }

  /// Fills the master shards from each tensor's Init, or with what the caller gives, on `compute`. Padding is zero.
  [[gnu::cold]] void initialize(Units& units, std::uint64_t seed, typename D::Stream& compute) {
    initial_values_ = WrittenValues(units.size());
    device_.zero_async(compute, master_.data(), master_.bytes());
    device_.zero_async(compute, scalars_.data(), scalars_.bytes());
    for (std::size_t u = 0; u < units.size(); ++u) {
      auto& unit = units[u];
      for (auto const& part : unit->layout().segments(unit->shard())) {
        auto const& tensor = unit->layout().tensors()[part.tensor];
        FSDP_EXPECTS(unit->initial || tensor.init.kind != Init::Kind::given,
                     "unit '{}': tensor '{}' has init given, but Shards::set_initial_values gives no values",
                     unit->name(), tensor.name);
        unit->with_shard([&]<class T>(T* shard) {
          if (unit->initial) return fill(u, *unit, tensor, part, shard + part.offset, dtype_of<T>, compute);
          kernels::initialize(device_, compute, shard + part.offset, part.count, tensor.init, seed,
                              hash_name(tensor.name), part.first);
        });
      }
    }
  }

  /// Counts the gradient shards as in use from now on.
  void count_gradients() {
    if (!std::exchange(gradients_leased_, true))
      account_->add_live(
          MemoryTag::gradients,
          static_cast<std::int64_t>(direct_gradients_.bytes() + reduced_gradients_.bytes() + partial_.bytes()));
  }

  NormState& norm() { return norm_; }
  /// Hashes of the values that initialize() got from callers.
  WrittenValues const& initial_values() const { return initial_values_; }

 private:
  /// Fills with values of the caller, of `type`. The calling thread waits for the copy.
  [[gnu::cold]] void fill(std::size_t number, Unit& unit, TensorInfo const& tensor, Segment const& part, void* to,
                          DType type, typename D::Stream& compute) {
    FixedArray<std::byte> values(static_cast<std::size_t>(part.count) * static_cast<std::size_t>(size_of(type)));
    unit.initial->fill(tensor, part.first, part.count, values.begin(), type);
    initial_values_.add(number, {values.begin(), values.size()});
    device_.copy_async(compute, to, values.begin(), values.size());
    device_.synchronize(compute);
  }

  D device_;
  WrittenValues initial_values_;
  MemoryAccount* account_;
  AccountedMemory<D> master_, reduced_gradients_, accumulators_, scratch_, norm_partials_;
  AccountedMemory<C> gather_, reduce_, direct_gradients_, partial_, scalars_;
  NormState norm_;
  std::int64_t live_parameters_ = 0;  ///< bytes of parameters
  bool gradients_leased_ = false;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
