// SPDX-License-Identifier: Apache-2.0
// State and steps of an optimizer on flat shards: moments, chunks, a step's scalars, the loop over units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fsdp/engine/moved_pointer.hpp"
#include "fsdp/engine/shards.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/kernels/optimizers.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/optim/grad_norm.hpp"
#include "fsdp/optim/moments.hpp"
#include "fsdp/optim/optimizer_layout.hpp"
#include "fsdp/optim/param_groups.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Moments and steps of one optimizer, of the tensors that it owns. The engine must outlive it.
///
/// [Note: Steps that are skipped] The host does not know whether a step is skipped: the norm that decides it is still
/// on its way. So the count of steps lives on the device, and so do the bias corrections that follow from it: a first
/// kernel reads the clip factor and writes the step's scalars, the units' kernels read them.
///
/// @tparam Moment  float or bf16
template <class E, class Moment>
class OptimizerState {
  static_assert(std::is_same_v<Moment, float> || std::is_same_v<Moment, bf16>,
                "fsdp: moments are float or fsdp::bf16 (fp16 cannot hold squares of small gradients)");

 public:
  /// The tensors of a unit that have the same settings. One launch of a kernel updates them.
  struct Part {
    OptimizerChunk const* chunks;  ///< in device memory
    std::int64_t chunk_count;
    OptimizerStep const* step;  ///< in device memory
    std::size_t unit;
    float first, second;  ///< beta1 and beta2; or momentum
  };
  /// Whether some type is narrower than fp32, so that stochastic rounding has an effect.
  static constexpr bool narrow = !std::is_same_v<typename E::Master, float> || !std::is_same_v<Moment, float>;

  /// Seals the engine, and takes memory for `moments` values per element of the shards.
  /// @param name  of the optimizer, for messages; must outlive it
  /// @param options  of the optimizer as text: the same on every rank
  /// @param stochastic  the optimizer rounds at random
  /// @throws UsageError if there is nothing to round, or a pattern of `owned` matches no tensor that trains;
  /// ConfigError on every rank if options differ
  /// @note Collective: yes. Waits for compute once.
  [[gnu::cold]] OptimizerState(E& engine, std::string_view name, std::string const& options, int moments,
                               detail::OwnedTensors owned, bool stochastic)
      : engine_(&engine), name_(name) {
    FSDP_EXPECTS(!stochastic || narrow, "rank {}: {}: stochastic rounding needs masters or moments narrower than fp32",
                 engine.rank(), name);
    auto const shards = engine.shards();
    auto const turn = shards.enter("an optimizer's constructor");
    shards.attach_optimizer();
    detail::expect_equal_texts(
        engine.world(), formatted("{}: {}, moments {}, {}", name, options, fsdp::name(dtype_of<Moment>), owned.text()),
        "optimizer options");
    detail::FixedArray<detail::OwnedUnit> units(shards.size());
    for (std::size_t u = 0; u < units.size(); ++u)
      units[u] = {&shards[u].layout(), shards[u].shard(), shards[u].frozen};
    layout_.emplace(std::move(owned), std::move(units));
    upload();
    moments_.emplace(engine, *layout_, moments);
  }
  /// The new object has the state; the old one must not be used. @note No kernel notices: addresses stay.
  OptimizerState(OptimizerState&&) noexcept = default;
  [[gnu::cold]] OptimizerState& operator=(OptimizerState&& other) noexcept {
    release();
    engine_ = std::move(other.engine_);
    name_ = other.name_;
    layout_ = std::move(other.layout_);
    moments_ = std::move(other.moments_);
    scalars_ = std::move(other.scalars_);
    steps_ = other.steps_;
    return *this;
  }
  [[gnu::cold]] ~OptimizerState() { release(); }

  /// @throws UsageError unless `learning_rate` is finite and not negative
  static void expect_learning_rate(std::string_view optimizer, float learning_rate) {
    FSDP_EXPECTS(math::is_finite(learning_rate) && learning_rate >= 0.0f,
                 "{}: the learning rate must be finite and not negative, got {}", optimizer, learning_rate);
  }

  /// Takes a step with this optimizer alone: calls `update(unit)` for every unit that trains, to enqueue its kernels on
  /// compute.
  /// @param clip  gradients are multiplied by the factor that it decided
  /// @throws UsageError on a learning rate out of range, a tensor that another optimizer must own, a unit without
  /// reduced gradients, a norm that is not that of these gradients (see clip_grad_norm), or gradients that are scaled
  /// and not the scaler's to step with; nothing has changed then
  template <class Update>
  void step(float learning_rate, GradNorm<E> const& clip, Update&& update) {
    expect_learning_rate(name_, learning_rate);
    auto const shards = engine().shards();
    auto const turn = shards.enter("an optimizer's step");
    FSDP_EXPECTS(layout_->left_out().empty(),
                 "rank {}: {}: tensor '{}' belongs to another optimizer; step with fsdp::Optimizers", engine().rank(),
                 name_, layout_->left_out());
    shards.begin_step(name_, learning_rate, clip);
    begin_step(learning_rate, clip.engine() != nullptr ? shards.norm().result : nullptr);
    detail::update_units(shards, update);
  }
  /// Enqueues the kernel that writes the step's scalars.
  /// @param clip  what clip_factor decided; null: no clipping
  void begin_step(float learning_rate, ClipScalars const* clip) {
    expect_learning_rate(name_, learning_rate);
    auto* step = steps_;
    for (auto const& settings : layout_->groups())
      kernels::begin_step(engine().device(), engine().compute(), step++, learning_rate * settings.lr_scale,
                          settings.first, settings.second, clip);
    moments_->begin_step();
  }
  /// Calls `launch(Part)` for each group of the unit's tensors, to enqueue its kernel.
  template <class Launch>
  void for_each_part(typename E::Unit const& unit, Launch&& launch) const {
    auto const u = unit.index();
    for (auto const* at = layout_->begin(u); at != layout_->end(u); ++at) {
      auto const& settings = layout_->groups()[at->group];
      launch(Part{scalars_.template as<OptimizerChunk>() + at->first_chunk, static_cast<std::int64_t>(at->chunks),
                  steps_ + at->group, u, settings.first, settings.second});
    }
  }

  E& engine() const { return *engine_.get(name_); }
  bool owns(TensorInfo const& tensor) const { return layout_->owns(tensor.name); }
  TensorSelection rest(TensorSelection among) const { return layout_->rest(std::move(among)); }

  /// A unit's moment `which`, during its update; nullptr if there are none.
  Moment* moment(std::int64_t which, Part const& part) const { return moments_->at(which, part.unit); }
  /// A unit's moment `which` between steps, laid out as the unit's shard; nullptr if the optimizer does not own all its
  /// tensors.
  /// @note Waits for stores.
  [[gnu::cold]] Moment* moment(std::size_t which, std::size_t unit) const {
    engine().shards().await_stores();
    return layout_->owns_all(unit) ? moments_->home(static_cast<std::int64_t>(which), unit) : nullptr;
  }
  /// The elements of moment `which` that belong to a part of the unit's shard. @note Waits for stores.
  /// @param part  of a tensor that trains and that the optimizer owns, counted from the shard's begin
  [[gnu::cold]] Moment* moment(std::size_t which, std::size_t unit, Segment const& part) const {
    engine().shards().await_stores();
    return moments_->home(static_cast<std::int64_t>(which), unit) + layout_->place(unit, part);
  }

  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const {
    auto const turn = engine().shards().enter("steps");
    OptimizerStep now{};
    engine().device().copy_async(engine().compute(), &now, steps_, sizeof now);
    engine().device().synchronize(engine().compute());
    return now.taken;
  }
  /// Continues as after `steps` steps. @throws UsageError if they are negative @note Waits for compute.
  void set_steps(std::int64_t steps) {
    FSDP_EXPECTS(steps >= 0, "rank {}: {}::set_steps: expected 0 or more, got {}", engine().rank(), name_, steps);
    auto const turn = engine().shards().enter("set_steps");
    engine().shards().history().add("set_steps with number of steps", steps);
    OptimizerStep const now{.taken = steps};
    for (std::size_t group = 0; group < layout_->groups().size(); ++group)
      engine().device().copy_async(engine().compute(), steps_ + group, &now, sizeof now);
    engine().device().synchronize(engine().compute());
  }

 private:
  [[gnu::cold]] void release() {
    if (!engine_.is_set()) return;
    engine().drain();
    if (moments_) moments_->release(engine());
  }
  /// Chunks and scalars to device memory.
  [[gnu::cold]] void upload() {
    auto const bytes = layout_->chunks().size() * sizeof(OptimizerChunk);
    auto const scalars = layout_->groups().size() * sizeof(OptimizerStep);
    auto const& device = engine().device();
    scalars_ = {device, engine().account(), MemoryTag::scalars, bytes + scalars};
    steps_ = reinterpret_cast<OptimizerStep*>(scalars_.data() + bytes);
    try {
      device.copy_async(engine().compute(), scalars_.data(), layout_->chunks().begin(), bytes);
      device.zero_async(engine().compute(), steps_, scalars);
      device.synchronize(engine().compute());
    } catch (...) {
      engine().drain();  // the memory is freed now
      throw;
    }
  }

  detail::MovedPointer<E> engine_;
  std::string_view name_;
  std::optional<detail::OptimizerLayout> layout_;
  AccountedMemory<typename E::Device const> scalars_;
  std::optional<detail::Moments<E, Moment>> moments_;
  OptimizerStep* steps_ = nullptr;  ///< of each group, in device memory
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
