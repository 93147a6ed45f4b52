// SPDX-License-Identifier: Apache-2.0
// A unit for trainers that own raw pointers: it sets the caller's pointers while its parameters are unsharded.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/base/guards.hpp"
#include "fsdp/engine.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A tensor of the caller: the addresses of its pointers, and its shape.
template <class Param, class Reduce>
struct AdoptedTensor {
  std::string name;          ///< full name, as messages and checkpoints have it
  Param** weight = nullptr;  ///< set while forward() or backward() lives
  /// Set while backward() lives. nullptr: the gradient stays 0, and weight decay goes on; see AdoptedOptions::frozen.
  Reduce** gradient = nullptr;
  std::vector<std::int64_t> shape;  ///< row-major extents
  TensorOptions options{};          ///< weight decay, initial values, whether it trains
  /// Index of this tensor in a stacked array (L, shape...) to which the pointers belong: `*weight + slice * elements`
  /// is set to the tensor. The caller may access no other slice.
  std::int64_t slice = 0;
};

/// Optional settings of an adopted unit, for its constructor.
struct AdoptedOptions {
  /// The caller's kernels are enqueued on engine.compute(), which need not be inline then.
  bool kernels_are_enqueued = false;
  std::optional<ShardingStrategy> strategy{};  ///< strategy of the unit, as in Engine::add_unit; not set: the engine's
  bool frozen = false;                         ///< freezes the unit: see UnitOptions. Gradient pointers may be left out
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
  using Param = typename E::Param;              ///< element type of the parameters that forward and backward read
  using Reduce = typename E::Reduce;            ///< element type of the gradients that backward writes
  using Tensor = AdoptedTensor<Param, Reduce>;  ///< one tensor of the unit

  /// @throws UsageError if compute is a host stream that is not inline, unless kernels are enqueued
  AdoptedUnit(E& engine, std::string name, std::vector<Tensor> tensors, AdoptedOptions options = {})
      : AdoptedUnit(engine, nullptr, name, std::move(tensors), options) {}
  /// Registers a further use of a unit, such as a tied head. Tensors that the unit has already, by name, are the same
  /// storage; they are declared as before. The unit is held from its first use to its last.
  /// @param name  of the use
  /// @throws UsageError also if options set a strategy: the unit has one
  AdoptedUnit(E& engine, UnitId unit, std::string name, std::vector<Tensor> tensors, AdoptedOptions options = {})
      : AdoptedUnit(engine, &unit, name, std::move(tensors), options) {}
  template <class None = void>
  AdoptedUnit(E&, ...) = delete;  // fsdp: expected (engine, name, tensors[, AdoptedOptions]); check the names in braces
  AdoptedUnit(AdoptedUnit&&) noexcept = default;  ///< passes of the source then throw; no Scope of it may live
  AdoptedUnit& operator=(AdoptedUnit&&) noexcept = default;  ///< no Scope of either may live

  /// Sets and clears the caller's pointers around one use.
  class [[nodiscard]] Scope {
   public:
    /// Begins one use and sets the pointers: forward(), backward() and recompute() call it.
    Scope(AdoptedUnit& owner, Pass pass)
        : owner_(&owner),
          use_(pass == Pass::forward    ? owner.engine().forward_scope(owner.use_)
               : pass == Pass::backward ? owner.engine().backward_scope(owner.use_)
                                        : owner.engine().recompute_scope(owner.use_)) {
      if (use_) owner.bind(use_);
    }
    Scope(Scope const&) = delete;
    ~Scope() noexcept(false) { owner_->unbind(); }
    /// The pointers are set: `if (auto full = unit.backward()) their_backward(w, g, x);` holds the scope around one
    /// call. False in backward if nothing at or below this use trains.
    explicit operator bool() const { return static_cast<bool>(use_); }

   private:
    AdoptedUnit* owner_;
    typename E::Scope use_;
  };
  /// Sets the weight pointers while the result lives. @note Stream and collective: as ShardedModule::forward.
  Scope forward() { return Scope(*this, Pass::forward); }
  /// Sets weight and gradient pointers while the result lives. @note Stream and collective: as ShardedModule::backward.
  Scope backward() { return Scope(*this, Pass::backward); }
  /// Recomputes forward in backward: see Engine::recompute_segment.
  Scope recompute() { return Scope(*this, Pass::recompute); }

  /// The unit, for further uses.
  UnitId unit() const { return unit_; }
  /// The unit's turn in the declared order, for prefetch lists.
  UseId use() const { return use_; }
  operator UseId() const { return use_; }  ///< the id that use() returns, so that lists of uses can contain the unit

 private:
  static constexpr std::int64_t most_slices = 1 << 20;

  /// @param further  the unit of a further use; nullptr: this one adds its unit
  AdoptedUnit(E& engine, UnitId const* further, std::string const& name, std::vector<Tensor> tensors,
              AdoptedOptions const& options)
      : engine_(&engine), tensors_(std::move(tensors)) {
    expect_compute(engine, name, options);
    if (further != nullptr) unit_ = expect_unit(engine, *further, name, options);
    std::vector<DeclaredTensor> declared;
    for (auto const& tensor : tensors_) {
      FSDP_EXPECTS(
          tensor.weight != nullptr,
          "rank {}: adopted tensor '{}': AdoptedTensor::weight is null; expected the address of the weight's pointer",
          engine.rank(), tensor.name);
      FSDP_EXPECTS(tensor.slice >= 0 && tensor.slice <= most_slices,
                   "rank {}: adopted tensor '{}': expected AdoptedTensor::slice from 0 to {}, got {}", engine.rank(),
                   tensor.name, most_slices, tensor.slice);
      FSDP_EXPECTS(static_cast<void*>(tensor.gradient) != static_cast<void*>(tensor.weight),
                   "rank {}: adopted tensor '{}': weight and gradient are the same pointer; expected one for each",
                   engine.rank(), tensor.name);
      for (auto const& other : tensors_)
        FSDP_EXPECTS(
            &other == &tensor ||
                (other.weight != tensor.weight && (other.gradient == nullptr || other.gradient != tensor.gradient)),
            "rank {}: adopted tensors '{}' and '{}' have the same pointer; expected one pointer for each tensor",
            engine.rank(), other.name, tensor.name);
      declared.push_back({tensor.name, tensor.shape, tensor.options, tensor.gradient == nullptr});
    }
    UnitOptions const of_unit{.strategy = options.strategy, .frozen = options.frozen};
    use_ = further != nullptr ? engine.declare_use(unit_, name, std::move(declared), places_)
                              : engine.declare_use(of_unit, name, std::move(declared), places_, unit_);
  }
  static UnitId expect_unit(E& engine, UnitId unit, std::string const& name, AdoptedOptions const& options) {
    bool const is_frozen = unit.index < engine.shards().size() && engine.shards()[unit].frozen;
    FSDP_EXPECTS(!options.strategy && (!options.frozen || is_frozen),
                 "rank {}: adopted unit '{}' is a further use of a unit; set strategy and frozen "
                 "where the unit is added",
                 engine.rank(), name);
    return unit;
  }
  static void expect_compute(E& engine, std::string const& name, AdoptedOptions const& options) {
    if constexpr (requires { engine.compute().runs_inline(); })
      FSDP_EXPECTS(
          options.kernels_are_enqueued || engine.compute().runs_inline(),
          "rank {}: adopted unit '{}': the engine's compute stream is a worker thread, and the unit's kernels run "
          "on the calling thread, so they could start before the parameters are there; give the engine a "
          "host::Stream::inline_stream, or enqueue "
          "the kernels on engine.compute() and set AdoptedOptions::kernels_are_enqueued",
          engine.rank(), name);
  }
  E& engine() const { return *engine_.get("an adopted unit"); }
  void bind(typename E::Scope const& scope) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      auto const number = unit_number(places_[i]);
      auto const& buffers = scope.buffers(number);
      auto const& known = scope.unit(number).layout().tensors()[tensor_index(places_[i])];
      auto const offset = known.offset - tensors_[i].slice * known.numel;
      *tensors_[i].weight = moved<Param>(const_cast<void*>(buffers.parameters), offset);
      if (buffers.gradients != nullptr && tensors_[i].gradient != nullptr)
        *tensors_[i].gradient = moved<Reduce>(buffers.gradients, offset);
    }
  }
  /// `pointer + offset`. The result may lie before the buffer.
  template <class T>
  static T* moved(void* pointer, std::int64_t offset) {
    auto const address = reinterpret_cast<std::uintptr_t>(pointer);
    return reinterpret_cast<T*>(address + static_cast<std::uintptr_t>(offset) * sizeof(T));
  }
  void unbind() {
    for (auto const& tensor : tensors_) {
      *tensor.weight = nullptr;
      if (tensor.gradient != nullptr) *tensor.gradient = nullptr;
    }
  }

  detail::CheckedPointer<E> engine_;
  UnitId unit_;
  UseId use_;
  std::vector<Tensor> tensors_;
  std::vector<TensorId> places_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
