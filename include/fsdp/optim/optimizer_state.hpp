// SPDX-License-Identifier: Apache-2.0
// What every optimizer on flat shards keeps and does: moments, chunks, a step's scalars, the walk over the units.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/engine/moved_pointer.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/init.hpp"
#include "fsdp/kernels/optimizers.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/optim/grad_norm.hpp"
#include "fsdp/optim/param_groups.hpp"

namespace fsdp {

/// Moments and steps of one optimizer, of the tensors that it owns. The engine must outlive it.
///
/// [Note: Steps that are skipped] The host does not know whether a step is skipped: the norm that decides it is still
/// on its way. So the count of steps lives on the device, and so do the bias corrections that follow from it: a first
/// kernel reads the clip factor and writes the step's scalars, the units' kernels read them.
///
/// [Note: Moments of some tensors] The moments of a unit are laid out as its shard if the optimizer owns all its
/// tensors. Else the parts that it owns lie end to end, each aligned as in a shard.
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
    std::int64_t offset;        ///< of the unit's elements in each moment
    float first, second;        ///< beta1 and beta2; or momentum
  };
  /// Something is narrower than fp32, so that stochastic rounding means something.
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
      : engine_(&engine), name_(name), owned_(std::move(owned)) {
    FSDP_EXPECTS(!stochastic || narrow, "rank {}: {}: stochastic rounding needs masters or moments narrower than fp32",
                 engine.rank(), name);
    auto const shards = engine.shards();
    auto const turn = shards.enter("an optimizer's constructor");
    shards.attach_optimizer();
    detail::expect_equal_texts(
        engine.world(), formatted("{}: {}, moments {}, {}", name, options, fsdp::name(dtype_of<Moment>), owned_.text()),
        "optimizer options");
    owned_.expect_matches(shards);
    auto const elements = cut();
    auto const bytes = static_cast<std::size_t>(elements) * static_cast<std::size_t>(moments) * sizeof(Moment);
    moments_ = {engine.device(), engine.account(), MemoryTag::optimizer, bytes};
    elements_ = elements;
    // Last: nothing may throw while compute writes memory that the destructor would have waited for.
    engine.account().lease(MemoryTag::optimizer, static_cast<std::int64_t>(bytes));
    if (bytes > 0) engine.device().zero_async(engine.compute(), moments_.data(), bytes);
  }
  /// The new object has the state; the old one must not be used. @note No kernel notices: addresses stay.
  OptimizerState(OptimizerState&&) noexcept = default;
  [[gnu::cold]] OptimizerState& operator=(OptimizerState&& other) noexcept {
    release();
    engine_ = std::move(other.engine_);
    name_ = other.name_;
    owned_ = std::move(other.owned_);
    elements_ = other.elements_;
    moments_ = std::move(other.moments_);
    scalars_ = std::move(other.scalars_);
    units_ = std::move(other.units_);
    launches_ = std::move(other.launches_);
    groups_ = std::move(other.groups_);
    left_out_ = std::move(other.left_out_);
    return *this;
  }
  [[gnu::cold]] ~OptimizerState() { release(); }

  /// @throws UsageError unless `learning_rate` is finite and not negative
  static void expect_learning_rate(std::string_view optimizer, float learning_rate) {
    FSDP_EXPECTS(math::is_finite(learning_rate) && learning_rate >= 0.0f,
                 "{}: the learning rate must be finite and not negative, got {}", optimizer, learning_rate);
  }

  /// A step with this optimizer alone: calls `update(unit)` for every unit that trains, to enqueue its kernels on
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
    FSDP_EXPECTS(left_out_.empty(), "rank {}: {}: tensor '{}' belongs to another optimizer; step with fsdp::Optimizers",
                 engine().rank(), name_, left_out_);
    shards.begin_step(name_, learning_rate, clip);
    begin_step(learning_rate, clip.engine() != nullptr ? shards.norm().result : nullptr, true);
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto& unit = shards[u];
      if (!unit.trains()) continue;
      auto const updating = shards.update(unit);
      auto span = shards.trace_update(unit);
      update(unit);
      span.end();
    }
  }
  /// Enqueues the kernel that writes the step's scalars.
  /// @param clip  what clip_factor decided; null: no clipping
  /// @param counts  count the step in clip->skipped if it is skipped
  void begin_step(float learning_rate, ClipScalars* clip, bool counts) {
    expect_learning_rate(name_, learning_rate);
    for (auto const& group : groups_) {
      kernels::begin_step(engine().device(), engine().compute(), group.step, learning_rate * group.settings.lr_scale,
                          group.settings.first, group.settings.second, clip, counts);
      counts = false;
    }
  }
  /// Calls `launch(Part)` for each group of the unit's tensors, to enqueue its kernel.
  template <class Launch>
  void for_each_part(typename E::Unit const& unit, Launch&& launch) const {
    auto const& at = units_[unit.index()];
    for (auto i = at.first_launch; i < units_[unit.index() + 1].first_launch; ++i) {
      auto const& [chunk, count, index] = launches_[i];
      auto const& group = groups_[index];
      launch(Part{scalars_.template as<OptimizerChunk>() + chunk, static_cast<std::int64_t>(count), group.step,
                  at.offset, group.settings.first, group.settings.second});
    }
  }

  E& engine() const { return *engine_.get(name_); }
  bool owns(TensorInfo const& tensor) const { return owned_.owns(tensor.name); }
  /// The tensors of `among` that the optimizer does not own.
  [[gnu::cold]] TensorSelection rest(TensorSelection among) const {
    for_each_tensor([&](std::size_t, TensorInfo const& tensor) {
      if (owns(tensor)) among.remove(tensor.name);
    });
    return among;
  }

  /// A unit's moment `which`; nullptr if there are none.
  Moment* moment(std::int64_t which, Part const& part) const { return moment_at(which, part.offset); }
  /// The same as a whole, laid out as the unit's shard; nullptr if the optimizer does not own all its tensors.
  [[gnu::cold]] Moment* moment(std::size_t which, std::size_t unit) const {
    return owns_all(unit) ? moment_at(static_cast<std::int64_t>(which), units_[unit].offset) : nullptr;
  }
  /// The elements of moment `which` that belong to a part of the unit's shard; nullptr if the optimizer has none.
  /// @param part  of a tensor, counted from the shard's begin
  [[gnu::cold]] Moment* moment(std::size_t which, std::size_t unit, Segment const& part) const {
    auto const& of = engine().shards()[unit];
    if (of.frozen || !owns(of.layout().tensors()[part.tensor])) return nullptr;
    return moment_at(static_cast<std::int64_t>(which), units_[unit].offset + part.offset + shift(unit, part.tensor));
  }

  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const {
    auto const turn = engine().shards().enter("steps");
    OptimizerStep now{};
    engine().device().copy_async(engine().compute(), &now, groups_[0].step, sizeof now);
    engine().device().synchronize(engine().compute());
    return now.taken;
  }
  /// Continues as after `steps` steps. @throws UsageError if they are negative @note Waits for compute.
  void set_steps(std::int64_t steps) {
    FSDP_EXPECTS(steps >= 0, "rank {}: {}::set_steps: expected 0 or more, got {}", engine().rank(), name_, steps);
    auto const turn = engine().shards().enter("set_steps");
    engine().shards().history().add("set_steps", static_cast<float>(steps));
    OptimizerStep const now{.taken = steps};
    for (auto const& group : groups_) engine().device().copy_async(engine().compute(), group.step, &now, sizeof now);
    engine().device().synchronize(engine().compute());
  }

 private:
  /// Tensors with equal settings, and the scalars of their steps.
  struct Group {
    detail::TensorSettings settings;
    OptimizerStep* step = nullptr;  ///< in device memory
  };
  struct UnitPlace {
    std::size_t first_launch = 0;
    std::int64_t offset = 0;  ///< of its elements in each moment
  };
  /// Chunks of one unit and one group.
  struct LaunchPlace {
    std::size_t first_chunk = 0, chunks = 0, group = 0;
  };

  [[gnu::cold]] void release() {
    if (!engine_.is_set()) return;
    engine().drain();
    engine().account().lease(MemoryTag::optimizer, -static_cast<std::int64_t>(moments_.bytes()));
  }
  Moment* moment_at(std::int64_t which, std::int64_t element) const {
    return moments_ ? moments_.template as<Moment>() + which * elements_ + element : nullptr;
  }
  /// Calls `act(unit, tensor)` for every tensor that trains.
  template <class Act>
  void for_each_tensor(Act&& act) const {
    auto const shards = engine().shards();
    for (std::size_t u = 0; u < shards.size(); ++u)
      for (auto const& tensor : shards[u].layout().tensors())
        if (!shards[u].frozen) act(u, tensor);
  }
  [[gnu::cold]] bool owns_all(std::size_t unit) const {
    auto const& of = engine().shards()[unit];
    bool all = !of.frozen;
    for (auto const& tensor : of.layout().tensors()) all = all && owns(tensor);
    return all;
  }
  /// Calls `act(Segment, shift)` for the parts of the unit's shard that the optimizer owns. An element's place in the
  /// shard plus `shift` is its place in the unit's moments: see [Note: Moments of some tensors].
  /// @return the elements of the unit's moments
  template <class Act>
  [[gnu::cold]] std::int64_t for_each_owned(std::size_t unit, Act const& act) const {
    auto const& of = engine().shards()[unit];
    bool const whole = owns_all(unit);
    std::int64_t place = 0;
    for (auto const& part : of.layout().segments(of.frozen ? Range{} : of.shard())) {
      if (!owns(of.layout().tensors()[part.tensor])) continue;
      act(part, whole ? 0 : place - part.offset);
      place += align_up(part.count, layout_alignment);
    }
    return whole ? of.shard_numel() : place;
  }
  [[gnu::cold]] std::int64_t shift(std::size_t unit, std::size_t tensor) const {
    std::int64_t found = 0;
    for_each_owned(unit, [&](Segment const& part, std::int64_t shift) {
      if (part.tensor == tensor) found = shift;
    });
    return found;
  }
  [[gnu::cold]] std::size_t group_of(TensorInfo const& tensor) const {
    auto const settings = owned_.of(tensor);
    std::size_t group = 0;
    while (group < groups_.size() && !groups_[group].settings.same_launch(settings)) ++group;
    return group;
  }
  [[gnu::cold]] void find_groups() {
    for_each_tensor([&](std::size_t, TensorInfo const& tensor) {
      if (!owns(tensor)) {
        if (left_out_.empty()) left_out_ = tensor.name;
        return;
      }
      auto const group = group_of(tensor);
      if (group < groups_.size()) return;
      detail::FixedArray<Group> more(group + 1);
      std::copy(groups_.begin(), groups_.end(), more.begin());
      more[group].settings = owned_.of(tensor);
      groups_ = std::move(more);
    });
    if (groups_.empty()) groups_ = detail::FixedArray<Group>(1);  // the engine has no parameters
  }
  /// Cuts the shards by group and by tensor. @return the elements of each moment
  [[gnu::cold]] std::int64_t cut() {
    find_groups();
    auto const shards = engine().shards();
    std::vector<OptimizerChunk> chunks;
    units_ = detail::FixedArray<UnitPlace>(shards.size() + 1);
    launches_ = detail::FixedArray<LaunchPlace>(shards.size() * groups_.size());
    std::size_t launches = 0;
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto const& tensors = shards[u].layout().tensors();
      std::int64_t elements = 0;
      for (std::size_t group = 0; group < groups_.size(); ++group) {
        auto const before = chunks.size();
        elements = for_each_owned(u, [&](Segment const& part, std::int64_t shift) {
          auto const& tensor = tensors[part.tensor];
          if (group_of(tensor) != group) return;
          auto const hash = hash_name(tensor.name);
          for (std::int64_t done = 0; done < part.count; done += kernels::chunk_elements)
            chunks.push_back({part.offset + done,
                              static_cast<std::int32_t>(std::min(kernels::chunk_elements, part.count - done)),
                              owned_.of(tensor).weight_decay, hash, part.first + done, shift});
        });
        if (chunks.size() > before) launches_[launches++] = {before, chunks.size() - before, group};
      }
      units_[u + 1] = {launches, units_[u].offset + elements};
    }
    auto const bytes = chunks.size() * sizeof(OptimizerChunk);
    auto const scalars = groups_.size() * sizeof(OptimizerStep);
    scalars_ = {engine().device(), engine().account(), MemoryTag::scalars, bytes + scalars};
    auto* const steps = reinterpret_cast<OptimizerStep*>(scalars_.data() + bytes);
    for (std::size_t group = 0; group < groups_.size(); ++group) groups_[group].step = steps + group;
    engine().device().copy_async(engine().compute(), scalars_.data(), chunks.data(), bytes);
    engine().device().zero_async(engine().compute(), steps, scalars);
    engine().device().synchronize(engine().compute());
    return units_.back().offset;
  }

  detail::MovedPointer<E> engine_;
  std::string_view name_;
  detail::OwnedTensors owned_;
  std::string left_out_;       ///< a tensor that the optimizer does not own
  std::int64_t elements_ = 0;  ///< of each moment
  AccountedMemory<typename E::Device const> moments_, scalars_;
  detail::FixedArray<Group> groups_;
  detail::FixedArray<UnitPlace> units_;  ///< one more than there are
  detail::FixedArray<LaunchPlace> launches_;
};

}  // namespace fsdp
