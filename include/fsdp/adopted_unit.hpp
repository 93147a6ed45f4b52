// SPDX-License-Identifier: Apache-2.0
// For trainers that own raw pointers: a unit that sets the caller's pointers while its parameters are there.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/engine.hpp"
#include "fsdp/engine/moved_pointer.hpp"

namespace fsdp {

/// One tensor of the caller's: where its pointers are kept, and its shape.
template <class Param, class Reduce>
struct AdoptedTensor {
  std::string name;
  Param** weight = nullptr;     ///< set while forward() or backward() lives
  Reduce** gradient = nullptr;  ///< set while backward() lives; nullptr: the gradient stays 0 (weight decay goes on)
  std::vector<std::int64_t> shape;
  TensorOptions options{};
};

struct AdoptedOptions {
  /// The caller's kernels are enqueued on engine.compute(), which need not be inline then.
  bool kernels_are_enqueued = false;
  std::optional<ShardingStrategy> strategy{};  ///< of its unit, as in Engine::add_unit; not set: the engine's
};

/// Registers the caller's tensors as the next unit in forward order.
///
/// ```
/// fsdp::AdoptedUnit fc{engine, "fc", {{"fc.weight", &w.fc, &g.fc, {4 * d, d}}, {"fc.bias", &w.bias, &g.bias, {4 * d},
/// fsdp::no_decay}}}; { auto full = fc.forward();  their_forward(w, x, acts); } { auto full = fc.backward();
/// their_backward(w, g, x, acts); }
/// ```
/// With an inline compute stream (host::Stream::inline_stream) the pointers may be used by the calling thread at once;
/// otherwise only by work enqueued on engine.compute(), and on the host AdoptedOptions has to say so: the calling
/// thread would read parameters that are not there yet. Backward adds to the gradients.
template <class E>
class AdoptedUnit {
 public:
  using Param = typename E::Param;
  using Reduce = typename E::Reduce;
  using Tensor = AdoptedTensor<Param, Reduce>;

  /// @throws UsageError if compute is a host stream that is not inline, unless kernels are enqueued
  AdoptedUnit(E& engine, std::string name, std::vector<Tensor> tensors, AdoptedOptions options = {})
      : engine_(&engine), unit_(checked(engine, name, options)), tensors_(std::move(tensors)) {
    for (auto const& tensor : tensors_) {
      FSDP_EXPECTS(
          tensor.weight != nullptr,
          "rank {}: adopted tensor '{}': AdoptedTensor::weight is null; expected the address of the weight's pointer",
          engine.rank(), tensor.name);
      for (auto const& other : tensors_)
        FSDP_EXPECTS(
            &other == &tensor ||
                (other.weight != tensor.weight && (other.gradient == nullptr || other.gradient != tensor.gradient)),
            "rank {}: adopted tensors '{}' and '{}' have the same pointer; expected one pointer for each tensor",
            engine.rank(), other.name, tensor.name);
      engine.shards()[unit_].layout().add({tensor.name, tensor.shape, 0, 0, tensor.options.decay, tensor.options.init},
                                          indices_);
    }
    use_ = engine.declare_use(unit_, name);
  }
  template <class None = void>
  AdoptedUnit(E&, ...) = delete;  // fsdp: expected (engine, name, tensors[, AdoptedOptions]); check the names in braces
  AdoptedUnit(AdoptedUnit&&) noexcept = default;
  AdoptedUnit& operator=(AdoptedUnit&&) noexcept = default;

  /// Sets and clears the caller's pointers around one use.
  class [[nodiscard]] Scope {
   public:
    Scope(AdoptedUnit& owner, Pass pass)
        : owner_(&owner),
          use_(pass == Pass::forward ? owner.engine().forward_scope(owner.use_)
                                     : owner.engine().backward_scope(owner.use_)) {
      owner.bind(const_cast<Param*>(use_.parameters()), pass == Pass::backward ? use_.gradients() : nullptr);
    }
    Scope(Scope const&) = delete;
    ~Scope() noexcept(false) { owner_->unbind(); }

   private:
    AdoptedUnit* owner_;
    typename E::Scope use_;
  };
  Scope forward() { return Scope(*this, Pass::forward); }
  Scope backward() { return Scope(*this, Pass::backward); }

  /// Its turn in the declared order: what prefetch lists name.
  UseId use() const { return use_; }
  operator UseId() const { return use_; }

 private:
  static UnitId checked(E& engine, std::string const& name, AdoptedOptions const& options) {
    if constexpr (requires { engine.compute().runs_inline(); })
      FSDP_EXPECTS(
          options.kernels_are_enqueued || engine.compute().runs_inline(),
          "rank {}: adopted unit '{}': the engine's compute stream is a worker thread, and the unit's kernels run "
          "on the calling thread, so they could start before the parameters are there; give the engine a "
          "host::Stream::inline_stream, or enqueue "
          "the kernels on engine.compute() and set AdoptedOptions::kernels_are_enqueued",
          engine.rank(), name);
    return engine.add_unit(name, options.strategy.value_or(engine.strategy()));
  }
  E& engine() const { return *engine_.get("an adopted unit"); }
  void bind(Param* parameters, Reduce* gradients) {
    auto const& layout = engine().shards()[unit_].layout();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      auto const offset = layout.tensors()[indices_[i]].offset;
      *tensors_[i].weight = parameters + offset;
      if (gradients != nullptr && tensors_[i].gradient != nullptr) *tensors_[i].gradient = gradients + offset;
    }
  }
  void unbind() {
    for (auto const& tensor : tensors_) {
      *tensor.weight = nullptr;
      if (tensor.gradient != nullptr) *tensor.gradient = nullptr;
    }
  }

  detail::MovedPointer<E> engine_;
  UnitId unit_;
  UseId use_;
  std::vector<Tensor> tensors_;
  std::vector<std::size_t> indices_;
};

}  // namespace fsdp
