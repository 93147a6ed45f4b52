// SPDX-License-Identifier: Apache-2.0
// State and steps of an optimizer on flat shards: layout and memory of moments, chunks, a step's scalars, the loop
// over units.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/base/guards.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "fsdp/detail/optim/tensor_selection.hpp"
#include "fsdp/error.hpp"
#include "fsdp/gradients.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/shards.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// The shards of an optimizer's tensors, cut by settings and by tensor. It knows no device.
///
/// [Note: Moments of some tensors] The moments of a unit are laid out as its shard if the optimizer owns all its
/// tensors. Else the parts that it owns lie end to end, each aligned as in a shard.
class OptimizerLayout {
 public:
  /// Chunks of one unit whose tensors have the same settings: one launch of a kernel.
  struct Launch {
    std::size_t first_chunk = 0, chunks = 0, group = 0;
  };

  /// @throws UsageError if a pattern of `owned` matches no tensor that trains
  [[gnu::cold]] OptimizerLayout(OwnedTensors owned, FixedArray<OwnedUnit> units)
      : owned_(std::move(owned)), units_(std::move(units)) {
    owned_.expect_matches(units_);
    find_groups();
    places_ = FixedArray<Place>(units_.size() + 1);
    launches_ = FixedArray<Launch>(units_.size() * groups_.size());
    std::size_t most = 0, launches = 0, chunks = 0;
    for (std::size_t unit = 0; unit < units_.size(); ++unit)
      for (auto const& part : segments(unit)) most += chunk_count(part);
    chunks_ = FixedArray<OptimizerChunk>(most);
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      for (std::size_t group = 0; group < groups_.size(); ++group) {
        auto const before = chunks;
        chunks = add_chunks(unit, group, before);
        if (chunks > before) launches_[launches++] = {before, chunks - before, group};
      }
      places_[unit + 1] = {launches, places_[unit].offset + elements_of(unit)};
    }
  }

  bool owns(std::string_view tensor) const { return owned_.owns(tensor); }
  /// A tensor that trains and that the optimizer does not own; "" if there is none.
  std::string const& left_out() const { return left_out_; }
  /// The tensors of `among` that the optimizer does not own.
  [[gnu::cold]] TensorSelection rest(TensorSelection among) const {
    for (auto const& unit : units_)
      for (auto const& tensor : unit.layout->tensors())
        if (!unit.frozen && owns(tensor.name)) among.remove(tensor.name);
    return among;
  }

  /// Chunks of all launches. Chunks past those of the last launch are unused.
  FixedArray<OptimizerChunk> const& chunks() const { return chunks_; }
  /// Distinct settings. At least one.
  FixedArray<TensorSettings> const& groups() const { return groups_; }
  Launch const* begin(std::size_t unit) const { return launches_.begin() + places_[unit].first_launch; }
  Launch const* end(std::size_t unit) const { return launches_.begin() + places_[unit + 1].first_launch; }

  std::size_t units() const { return units_.size(); }
  /// Elements of each moment.
  std::int64_t elements() const { return places_.back().offset; }
  /// Offset of a unit's elements in each moment; for the last unit + 1, their end.
  std::int64_t offset(std::size_t unit) const { return places_[unit].offset; }
  /// The place of a part of the unit's shard among the unit's elements. @pre the optimizer owns its tensor
  [[gnu::cold]] std::int64_t place(std::size_t unit, Segment const& part) const {
    return part.offset + shift(unit, part.tensor);
  }
  /// Whether the unit trains, and the optimizer owns all its tensors.
  [[gnu::cold]] bool owns_all(std::size_t unit) const {
    bool all = !units_[unit].frozen;
    for (auto const& tensor : units_[unit].layout->tensors()) all = all && owns(tensor.name);
    return all;
  }

 private:
  struct Place {
    std::size_t first_launch = 0;
    std::int64_t offset = 0;
  };

  [[gnu::cold]] std::vector<Segment> segments(std::size_t unit) const {
    auto const& of = units_[unit];
    return of.layout->segments(of.frozen ? Range{} : of.shard);
  }
  TensorInfo const& tensor(std::size_t unit, std::size_t index) const { return units_[unit].layout->tensors()[index]; }
  /// The difference of an element's place in the unit's moments and in its shard. With a tensor past the last one: the
  /// end of the unit's moments.
  [[gnu::cold]] std::int64_t shift(std::size_t unit, std::size_t tensor) const {
    if (owns_all(unit)) return 0;
    std::int64_t place = 0;
    for (auto const& part : segments(unit)) {
      if (part.tensor == tensor) return place - part.offset;
      if (owns(this->tensor(unit, part.tensor).name)) place += align_up(part.count, layout_alignment);
    }
    return place;
  }
  [[gnu::cold]] std::int64_t elements_of(std::size_t unit) const {
    return owns_all(unit) ? units_[unit].shard.size() : shift(unit, units_[unit].layout->tensors().size());
  }
  [[gnu::cold]] std::size_t group_of(TensorInfo const& tensor) const {
    auto const settings = owned_.of(tensor);
    std::size_t group = 0;
    while (group < groups_.size() && !groups_[group].same_launch(settings)) ++group;
    return group;
  }
  [[gnu::cold]] void find_groups() {
    for (auto const& unit : units_) {
      for (auto const& tensor : unit.layout->tensors()) {
        if (unit.frozen) break;
        if (!owns(tensor.name)) {
          if (left_out_.empty()) left_out_ = tensor.name;
          continue;
        }
        auto const group = group_of(tensor);
        if (group < groups_.size()) continue;
        FixedArray<TensorSettings> more(group + 1);
        std::copy(groups_.begin(), groups_.end(), more.begin());
        more[group] = owned_.of(tensor);
        groups_ = std::move(more);
      }
    }
    if (groups_.empty()) groups_ = FixedArray<TensorSettings>(1);  // the engine has no parameters
  }
  static std::size_t chunk_count(Segment const& part) {
    return static_cast<std::size_t>((part.count + kernels::chunk_elements - 1) / kernels::chunk_elements);
  }
  /// Writes the chunks of a unit and a group from `at` on. @return their end
  [[gnu::cold]] std::size_t add_chunks(std::size_t unit, std::size_t group, std::size_t at) {
    for (auto const& part : segments(unit)) {
      auto const& of = tensor(unit, part.tensor);
      if (!owns(of.name) || group_of(of) != group) continue;
      auto const decay = owned_.of(of).weight_decay;
      auto const hash = hash_name(of.name);
      auto const moved = shift(unit, part.tensor);
      for (std::int64_t done = 0; done < part.count; done += kernels::chunk_elements)
        chunks_[at++] = {part.offset + done,
                         static_cast<std::int32_t>(std::min(kernels::chunk_elements, part.count - done)),
                         decay,
                         hash,
                         part.first + done,
                         moved};
    }
    return at;
  }

  OwnedTensors owned_;
  FixedArray<OwnedUnit> units_;
  FixedArray<TensorSettings> groups_;
  FixedArray<Place> places_;  ///< by unit; one more for the end
  FixedArray<Launch> launches_;
  FixedArray<OptimizerChunk> chunks_;
  std::string left_out_;
};

/// `count` values for each element of a layout. If the engine offloads moments, they lie in host memory, and the device
/// has two slots of the size of the largest unit's: see [Note: Offloading].
/// @tparam T  of a moment
template <class E, class T>
class Moments {
 public:
  /// All moments are zero, once compute has run dry.
  /// @note Stream: zeroed on compute
  [[gnu::cold]] Moments(E& engine, OptimizerLayout const& layout, int count)
      : count_(count), elements_(layout.elements()), starts_(layout.units() + 1) {
    for (std::size_t u = 0; u < layout.units(); ++u) starts_[u + 1] = layout.offset(u + 1);
    auto const& core = engine.shards().core();
    auto const each = count_ * static_cast<std::int64_t>(sizeof(T));
    bool const offloads = core.declared.offload.moments && elements_ * each > 0;
    std::int64_t largest = 0;
    for (std::size_t u = 0; u < layout.units(); ++u) largest = std::max(largest, size(u));
    auto const bytes = static_cast<std::size_t>(each * (offloads ? 2 * largest : elements_));
    device_ = {engine.device(), engine.account(), MemoryTag::optimizer, bytes};
    if (offloads) {
      FixedArray<std::int64_t> starts(starts_.size());
      for (std::size_t u = 0; u < starts.size(); ++u) starts[u] = each * starts_[u];
      host_ = core.offload->make_moments(std::move(starts), device_.data(), each * largest);
    }
    // Last: nothing may throw while compute writes memory that the destructor would have waited for.
    engine.account().add_live(MemoryTag::optimizer, static_cast<std::int64_t>(bytes));
    if (!offloads && bytes > 0) engine.device().zero_async(engine.compute(), device_.data(), bytes);
  }
  Moments(Moments&&) noexcept = default;
  /// @pre released
  Moments& operator=(Moments&&) noexcept = default;
  /// @pre kernels that use the moments have ended
  [[gnu::cold]] void release(E& engine) {
    engine.account().add_live(MemoryTag::optimizer, -static_cast<std::int64_t>(device_.bytes()));
    if (host_ != nullptr) engine.shards().core().offload->free_moments(host_);
    host_ = nullptr;
  }

  /// Adds the optimizer to the step that has begun.
  void begin_step() {
    if (host_ != nullptr) host_->steps = true;
  }
  /// A unit's moment `which`, during its update.
  T* at(std::int64_t which, std::size_t unit) const {
    return host_ != nullptr ? reinterpret_cast<T*>(host_->staged[unit]) + which * size(unit) : home(which, unit);
  }
  /// A unit's moment `which` between steps; nullptr if there are none. @pre Shards::await_stores
  T* home(std::int64_t which, std::size_t unit) const {
    if (elements_ == 0 || count_ == 0) return nullptr;
    if (host_ != nullptr) return reinterpret_cast<T*>(host_->home(unit)) + which * size(unit);
    return device_.template as<T>() + which * elements_ + starts_[unit];
  }

 private:
  std::int64_t size(std::size_t unit) const { return starts_[unit + 1] - starts_[unit]; }

  int count_;
  std::int64_t elements_;                             ///< of one moment
  FixedArray<std::int64_t> starts_;                   ///< of each unit's elements; one more for the end
  AccountedMemory<typename E::Device const> device_;  ///< all moments, or two slots
  HostMoments* host_ = nullptr;                       ///< nullptr: they are in device memory
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail

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
    auto const entry = shards.enter("an optimizer's constructor");
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
  [[gnu::cold]] ~OptimizerState();

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
    auto const entry = shards.enter("an optimizer's step");
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
    auto const entry = engine().shards().enter("steps");
    OptimizerStep now{};
    engine().device().copy_async(engine().compute(), &now, steps_, sizeof now);
    engine().device().synchronize(engine().compute());
    return now.taken;
  }
  /// Continues as after `steps` steps. @throws UsageError if they are negative @note Waits for compute.
  void set_steps(std::int64_t steps) {
    FSDP_EXPECTS(steps >= 0, "rank {}: {}::set_steps: expected 0 or more, got {}", engine().rank(), name_, steps);
    auto const entry = engine().shards().enter("set_steps");
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

  detail::CheckedPointer<E> engine_;
  std::string_view name_;
  std::optional<detail::OptimizerLayout> layout_;
  AccountedMemory<typename E::Device const> scalars_;
  std::optional<detail::Moments<E, Moment>> moments_;
  OptimizerStep* steps_ = nullptr;  ///< of each group, in device memory
};

template <class E, class Moment>
OptimizerState<E, Moment>::~OptimizerState() {
  release();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
