// SPDX-License-Identifier: Apache-2.0
// The memory of an engine: everything that is allocated when it is sealed, and who gets which part of it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/reducer.hpp"
#include "fsdp/engine/unsharder.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/kernels/norms.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/step/memory_plan.hpp"
#include "fsdp/step/program.hpp"

namespace fsdp {

/// Sums over the world of W doubles, each rank owning one; and what comes of them. In device memory.
struct NormState {
  double* partials = nullptr;  ///< shares of this rank's world slices, unit after unit
  double* slices = nullptr;    ///< (world)
  ClipScalars* result = nullptr;
  Ticket ticket{};                    ///< the last all-reduce of `slices`
  float const* loss_scale = nullptr;  ///< what gradients are scaled by; nullptr: nothing
  bool scaler_steps = false;          ///< the optimizer is called by the owner of the scale
};

/// Master shards, gradient shards, full-size buffers and scalars of one engine.
template <Communicator C, class P>
class ShardStorage {
 public:
  using D = typename C::Device;
  using Unit = FlatParam<D, P>;
  using Master = typename P::Master;
  using Units = std::vector<std::unique_ptr<Unit>>;

  ShardStorage(D const& device, MemoryAccount& account) : device_(device), account_(&account) {}

  /// Allocates what `plan` says and hands it out.
  /// Full-size buffers are allocated on the world communicator: every group split from it may then read its peers'
  /// parts.
  /// @note Collective: yes.
  [[gnu::cold]] void allocate(C& world, Units& units, Program const& program, MemoryPlan const& plan,
                              Unsharder<C, P>& gather, Reducer<C, P>& reduce) {
    add_slots(gather.pool(), program.gather_slots, sizeof(typename P::Param));
    add_slots(gather.kept_pool(), program.kept_slots, sizeof(typename P::Param));
    add_slots(reduce.pool(), program.gradient_slots, sizeof(typename P::Reduce));
    add_slots(reduce.wires(), program.wires, program.reduce_bytes);

    std::size_t reduced_bytes = 0, direct_bytes = 0;  // of gradient shards
    std::int64_t partial_elements = 0;
    for (std::size_t u = 0; u < units.size(); ++u) {
      auto const bytes = static_cast<std::size_t>(units[u]->shard_numel()) * sizeof(float);
      (program.units[u].writes_shards ? direct_bytes : reduced_bytes) += bytes;
      if (program.units[u].waits_for_replicas) partial_elements += units[u]->shard_numel();
    }
    master_ = {device_, *account_, MemoryTag::parameters, static_cast<std::size_t>(plan.parameters)};
    gather_ = {world, *account_, MemoryTag::gather, gather.pool().bytes() + gather.kept_pool().bytes()};
    auto const reduce_bytes = reduce.pool().bytes() + reduce.wires().bytes();
    reduce_ = {world, *account_, MemoryTag::reduce, reduce_bytes};
    if (direct_bytes > 0) direct_gradients_ = {world, *account_, MemoryTag::gradients, direct_bytes};
    if (reduced_bytes > 0) reduced_gradients_ = {device_, *account_, MemoryTag::gradients, reduced_bytes};
    if (partial_elements > 0)
      partial_ = {world, *account_, MemoryTag::gradients, static_cast<std::size_t>(partial_elements) * sizeof(float)};
    auto const accumulator_bytes = static_cast<std::size_t>(plan.reduce) - reduce_bytes;
    if (accumulator_bytes > 0) accumulators_ = {device_, *account_, MemoryTag::reduce, accumulator_bytes};
    auto const norm_bytes = static_cast<std::size_t>(align_up(world.size() * 8, 256));
    scalars_ = {world, *account_, MemoryTag::scalars, norm_bytes + sizeof(ClipScalars)};
    std::int64_t partials = 0;
    for (auto const& unit : units) partials += kernels::norm_partial_count(unit->norm_slice().size());
    norm_partials_ = {device_, *account_, MemoryTag::scalars, static_cast<std::size_t>(partials) * sizeof(double)};
    account_->lease(MemoryTag::parameters, plan.parameters);

    gather.pool().place(gather_.data());
    gather.kept_pool().place(gather_.data() + gather.pool().bytes());
    reduce.pool().place(reduce_.data());
    reduce.wires().place(reduce_.data() + reduce.pool().bytes());
    norm_.partials = norm_partials_.template as<double>();
    norm_.slices = scalars_.template as<double>();
    norm_.result = reinterpret_cast<ClipScalars*>(scalars_.data() + norm_bytes);
  }

  /// Tells communicators which memory they move, where they want to know.
  /// @note Collective: yes, over each of them.
  [[gnu::cold]] void register_memory(Unsharder<C, P>& gather, Reducer<C, P>& reduce, std::optional<C>& scalars) {
    gather.register_memory(gather_);
    reduce.register_memory(reduce_, direct_gradients_, partial_);
    register_with(scalars, scalars_);
  }

  /// Master shards lie in declared order; gradient shards as Program::gradient_order says.
  [[gnu::cold]] void place_shards(Units& units, Program const& program) {
    auto* master = master_.template as<Master>();
    for (auto& unit : units) {
      unit->master = master;
      master += unit->shard_numel();
    }
    auto *direct = direct_gradients(), *reduced = reduced_gradients_.template as<float>();
    auto* partial = partial_.template as<float>();
    auto* accumulator = accumulators_.template as<float>();
    for (auto const index : program.gradient_order) {
      auto& unit = *units[index];
      auto*& gradient = program.units[index].writes_shards ? direct : reduced;
      unit.gradient = std::exchange(gradient, gradient + unit.shard_numel());
      if (program.units[index].waits_for_replicas) unit.partial = std::exchange(partial, partial + unit.shard_numel());
      if (accumulator != nullptr) unit.accumulator = std::exchange(accumulator, accumulator + unit.full_numel());
    }
  }

  /// Fills the master shards from each tensor's Init, on `compute`. Padding is zero.
  [[gnu::cold]] void initialize(Units& units, std::uint64_t seed, typename D::Stream& compute) {
    device_.zero_async(compute, master_.data(), master_.bytes());
    device_.zero_async(compute, scalars_.data(), scalars_.bytes());
    for (auto& unit : units) {
      for (auto const& part : unit->layout().segments(unit->shard())) {
        auto const& tensor = unit->layout().tensors()[part.tensor];
        kernels::initialize(device_, compute, unit->master + part.offset, part.count, tensor.init, seed,
                            hash_name(tensor.name), part.first);
      }
    }
  }

  /// The gradient shards are in use from now on.
  void lease_gradients() {
    if (!std::exchange(gradients_leased_, true))
      account_->lease(MemoryTag::gradients, static_cast<std::int64_t>(direct_gradients_.bytes() +
                                                                      reduced_gradients_.bytes() + partial_.bytes()));
  }

  /// Gradient shards that backward writes itself; nullptr if there are none.
  float* direct_gradients() const { return direct_gradients_.template as<float>(); }
  NormState& norm() { return norm_; }

 private:
  [[gnu::cold]] void add_slots(BufferPool<D>& pool, std::vector<BufferPlan> const& slots, std::size_t element_bytes) {
    pool.reserve(slots.size());
    for (auto const& slot : slots)
      pool.add(device_, static_cast<std::size_t>(slot_bytes(slot.elements, element_bytes)));
  }

  D device_;
  MemoryAccount* account_;
  AccountedMemory<D> master_, reduced_gradients_, accumulators_, norm_partials_;
  AccountedMemory<C> gather_, reduce_, direct_gradients_, partial_, scalars_;
  NormState norm_;
  bool gradients_leased_ = false;
};

}  // namespace fsdp
