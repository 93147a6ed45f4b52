// SPDX-License-Identifier: Apache-2.0
// What every optimizer on flat shards keeps and does: moments, chunks, a step's scalars, the walk over the units.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/init.hpp"
#include "fsdp/kernels/optimizers.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/optim/grad_norm.hpp"

namespace fsdp {

/// Moments and step of one optimizer. The engine must outlive it.
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
  /// One unit's share of the state.
  struct Part {
    OptimizerChunk const* chunks;  ///< in device memory
    std::int64_t chunk_count;
    OptimizerStep const* step;  ///< in device memory
    std::int64_t offset;        ///< of the unit's elements in each moment
  };
  /// Something is narrower than fp32, so that stochastic rounding means something.
  static constexpr bool narrow = !std::is_same_v<typename E::Master, float> || !std::is_same_v<Moment, float>;

  /// Seals the engine, and takes memory for `moments` values per element of the shards.
  /// @param name  of the optimizer, for messages; must outlive it
  /// @param options  of the optimizer as text: the same on every rank
  /// @param stochastic  the optimizer rounds at random
  /// @throws UsageError if there is nothing to round; ConfigError on every rank if options differ
  /// @note Collective: yes. Waits for compute once.
  [[gnu::cold]] OptimizerState(E& engine, std::string_view name, std::string const& options, int moments,
                               float weight_decay, bool stochastic)
      : engine_(&engine), name_(name) {
    FSDP_EXPECTS(!stochastic || narrow, "rank {}: {}: stochastic rounding needs masters or moments narrower than fp32",
                 engine.rank(), name);
    auto const shards = engine.shards();
    auto const turn = shards.enter("an optimizer's constructor");
    shards.attach_optimizer();
    detail::expect_equal_texts(engine.world(),
                               formatted("{}: {}, moments {}", name, options, fsdp::name(dtype_of<Moment>)),
                               "optimizer options");
    std::int64_t elements = 0;
    for (std::size_t u = 0; u < shards.size(); ++u)
      if (shards[u].trains()) elements += shards[u].shard_numel();
    auto const bytes = static_cast<std::size_t>(elements) * static_cast<std::size_t>(moments) * sizeof(Moment);
    moments_ = {engine.device(), engine.account(), MemoryTag::optimizer, bytes};
    elements_ = elements;
    cut(weight_decay);
    // Last: nothing may throw while compute writes memory that the destructor would have waited for.
    engine.account().lease(MemoryTag::optimizer, static_cast<std::int64_t>(bytes));
    if (bytes > 0) engine.device().zero_async(engine.compute(), moments_.data(), bytes);
  }
  OptimizerState(OptimizerState&&) = delete;
  [[gnu::cold]] ~OptimizerState() {
    engine_->drain();
    engine_->account().lease(MemoryTag::optimizer, -static_cast<std::int64_t>(moments_.bytes()));
  }

  /// @throws UsageError unless `learning_rate` is finite and not negative
  static void expect_learning_rate(std::string_view optimizer, float learning_rate) {
    FSDP_EXPECTS(math::is_finite(learning_rate) && learning_rate >= 0.0f,
                 "{}: the learning rate must be finite and not negative, got {}", optimizer, learning_rate);
  }

  /// Calls `update(unit, Part)` for every unit, to enqueue its kernel on compute.
  /// @param clip  gradients are multiplied by the factor that it decided
  /// @throws UsageError on a learning rate out of range, a unit without reduced gradients, a norm that is not that of
  /// these gradients (see clip_grad_norm), or gradients that are scaled and not the scaler's to step with; nothing has
  /// changed then
  template <class Update>
  void step(float learning_rate, GradNorm<E> const& clip, float beta1, float beta2, Update&& update) {
    expect_learning_rate(name_, learning_rate);
    auto const shards = engine_->shards();
    auto const turn = shards.enter("an optimizer's step");
    shards.begin_step(name_, learning_rate, clip);
    auto& compute = engine_->compute();
    kernels::begin_step(engine_->device(), compute, step_, learning_rate, beta1, beta2,
                        clip.engine() != nullptr ? shards.norm().result : nullptr);
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto& unit = shards[u];
      if (!unit.trains()) continue;
      auto const updating = shards.update(unit);
      auto span = shards.trace_update(unit);
      update(unit, parts_[u]);
      span.end();
    }
  }

  /// A unit's shard of moment `which`; nullptr if there are none. Frozen units have none.
  Moment* moment(std::int64_t which, Part const& part) const {
    return moments_ ? moments_.template as<Moment>() + which * elements_ + part.offset : nullptr;
  }
  Moment* moment(std::size_t which, std::size_t unit) const {
    return engine_->shards()[unit].frozen ? nullptr : moment(static_cast<std::int64_t>(which), parts_[unit]);
  }

  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const {
    auto const turn = engine_->shards().enter("steps");
    OptimizerStep now{};
    engine_->device().copy_async(engine_->compute(), &now, step_, sizeof now);
    engine_->device().synchronize(engine_->compute());
    return now.taken;
  }
  /// Continues as after `steps` steps. @throws UsageError if they are negative @note Waits for compute.
  void set_steps(std::int64_t steps) {
    FSDP_EXPECTS(steps >= 0, "rank {}: {}::set_steps: expected 0 or more, got {}", engine_->rank(), name_, steps);
    auto const turn = engine_->shards().enter("set_steps");
    engine_->shards().history().add("set_steps", static_cast<float>(steps));
    OptimizerStep const now{.taken = steps};
    engine_->device().copy_async(engine_->compute(), step_, &now, sizeof now);
    engine_->device().synchronize(engine_->compute());
  }

 private:
  /// Cuts the shards by tensor, each with its own weight decay.
  [[gnu::cold]] void cut(float weight_decay) {
    auto const shards = engine_->shards();
    std::vector<OptimizerChunk> chunks;
    std::vector<std::size_t> ends;
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto const& unit = shards[u];
      for (auto const& part : unit.layout().segments(unit.frozen ? Range{} : unit.shard())) {
        auto const& tensor = unit.layout().tensors()[part.tensor];
        auto const hash = hash_name(tensor.name);
        for (std::int64_t done = 0; done < part.count; done += kernels::chunk_elements)
          chunks.push_back({part.offset + done,
                            static_cast<std::int32_t>(std::min(kernels::chunk_elements, part.count - done)),
                            tensor.decay ? weight_decay : 0.0f, hash, part.first + done});
      }
      ends.push_back(chunks.size());
    }
    auto const bytes = chunks.size() * sizeof(OptimizerChunk);
    scalars_ = {engine_->device(), engine_->account(), MemoryTag::scalars, bytes + sizeof(OptimizerStep)};
    auto* const at = scalars_.data();
    step_ = reinterpret_cast<OptimizerStep*>(at + bytes);
    std::int64_t offset = 0;
    for (std::size_t u = 0, begin = 0; u < ends.size(); begin = ends[u++]) {
      parts_.push_back({reinterpret_cast<OptimizerChunk const*>(at) + begin, static_cast<std::int64_t>(ends[u] - begin),
                        step_, offset});
      if (shards[u].trains()) offset += shards[u].shard_numel();
    }
    engine_->device().copy_async(engine_->compute(), at, chunks.data(), bytes);
    engine_->device().zero_async(engine_->compute(), step_, sizeof(OptimizerStep));
    engine_->device().synchronize(engine_->compute());
  }

  E* engine_;
  std::string_view name_;
  std::int64_t elements_ = 0;  ///< of this rank's shards
  AccountedMemory<typename E::Device const> moments_, scalars_;
  std::vector<Part> parts_;
  OptimizerStep* step_ = nullptr;
};

}  // namespace fsdp
