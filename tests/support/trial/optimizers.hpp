// SPDX-License-Identifier: Apache-2.0
// Optimizers of trials: one of a user's that has collectives, and one type for all that step together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

namespace trial {

/// Moves each tensor by its gradient minus the gradient's mean over the whole tensor, which lies in the shards of
/// several ranks: they gather the unit's gradients on the compute stream, over a communicator of its own.
template <class E>
class Centred {
 public:
  /// @note Collective: yes.
  Centred(E& engine, fsdp::TensorSelection tensors)
      : engine_(&engine),
        tensors_(std::move(tensors)),
        shard_group_(engine.world().split(engine.placement().replica, engine.placement().shard, "centred")) {
    auto const shards = engine.shards();
    shards.attach_optimizer();
    std::int64_t elements = 0;
    for (std::size_t u = 0; u < shards.size(); ++u)
      if (owns_some(shards[u])) elements = std::max(elements, shards[u].full_numel());
    gathered_ = {engine.world(), engine.account(), fsdp::MemoryTag::workspace,
                 static_cast<std::size_t>(elements) * sizeof(float)};
  }
  Centred(Centred const&) = delete;
  ~Centred() { engine_->drain(); }

  static constexpr std::string_view name() { return "Centred"; }
  bool owns(fsdp::TensorInfo const& tensor) const { return tensors_.contains(tensor.name); }
  void begin_step(float lr, fsdp::ClipScalars const* clip) { rate_ = lr, clip_ = clip; }
  void update(typename E::Unit& unit) {
    if (!owns_some(unit)) return;
    auto& compute = engine_->compute();
    auto* const whole = gathered_.template as<float>();
    auto* const own = whole + unit.shard().begin;
    // Peers may still read what this rank sent of another unit.
    if (sent_.sequence != 0) shard_group_.wait_for_peers(compute, sent_, fsdp::WaitSite::none);
    engine_->device().copy_async(compute, own, static_cast<float const*>(unit.gradient),
                                 static_cast<std::size_t>(unit.shard_numel()) * sizeof(float));
    if (unit.placement().shards > 1)
      sent_ =
          shard_group_.all_gather(compute, static_cast<float const*>(own), whole,
                                  static_cast<std::size_t>(unit.shard_numel()), fsdp::Label{unit.name(), "optimizer"});
    for (auto const& part : unit.layout().segments(unit.shard())) {
      auto const& tensor = unit.layout().tensors()[part.tensor];
      if (!owns(tensor)) continue;
      unit.with_master([&](auto* master) {
        compute.enqueue([w = master + part.offset, g = whole + tensor.offset, count = part.count, first = part.first,
                         numel = tensor.numel, rate = rate_, clip = clip_] {
          float const factor = clip == nullptr ? 1.0f : clip->factor;
          if (factor < 0.0f) return;
          double sum = 0.0;
          for (std::int64_t i = 0; i < numel; ++i) sum += static_cast<double>(g[i]);
          auto const mean = static_cast<float>(sum / static_cast<double>(numel));
          for (std::int64_t i = 0; i < count; ++i) w[i] -= rate * (factor * (g[first + i] - mean));
        });
      });
    }
  }

 private:
  using Comm = typename E::Comm;

  bool owns_some(typename E::Unit const& unit) const {
    for (auto const& tensor : unit.layout().tensors())
      if (!unit.frozen && owns(tensor)) return true;
    return false;
  }

  E* engine_;
  fsdp::TensorSelection tensors_;
  Comm shard_group_;
  fsdp::AccountedMemory<Comm> gathered_;
  fsdp::Ticket sent_{};
  float rate_ = 0.0f;
  fsdp::ClipScalars const* clip_ = nullptr;
};

/// One of several optimizers that step together, whatever its type; by default one that owns nothing.
template <class E>
class AnyPart {
 public:
  explicit AnyPart(E& engine) : engine_(&engine) {}
  template <class O>
  AnyPart(E& engine, O& optimizer)
      : engine_(&engine),
        name_(optimizer.name()),
        owns_([&optimizer](fsdp::TensorInfo const& tensor) { return optimizer.owns(tensor); }),
        begin_step_([&optimizer](float lr, fsdp::ClipScalars const* clip) { optimizer.begin_step(lr, clip); }),
        update_([&optimizer](typename E::Unit& unit) { optimizer.update(unit); }) {}

  E& engine() const { return *engine_; }
  std::string_view name() const { return name_; }
  bool owns(fsdp::TensorInfo const& tensor) const { return owns_ && owns_(tensor); }
  void begin_step(float lr, fsdp::ClipScalars const* clip) {
    if (begin_step_) begin_step_(lr, clip);
  }
  void update(typename E::Unit& unit) {
    if (update_) update_(unit);
  }

 private:
  E* engine_;
  std::string_view name_ = "none";
  std::function<bool(fsdp::TensorInfo const&)> owns_;
  std::function<void(float, fsdp::ClipScalars const*)> begin_step_;
  std::function<void(typename E::Unit&)> update_;
};

}  // namespace trial
