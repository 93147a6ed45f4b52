// SPDX-License-Identifier: Apache-2.0
// A sharded module: forward and backward of a user's module, and the gathers and reductions of its unit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/guards.hpp"
#include "fsdp/detail/engine/declaration.hpp"
#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/detail/engine/register_module.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/options.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// Addresses of the tensors that a module named when it was registered, one after the other.
/// @tparam Scope  UseScope
template <class Scope>
struct NamedTensors {
  Scope const* scope;
  TensorId const* next;
  TensorId const* end;
  bool gradients;  ///< false: parameters
  bool skips;      ///< gradients that are not wanted are left out

  struct Bound {
    void* data;  ///< nullptr: no gradient is wanted
    bool fresh;  ///< a gradient of undefined elements, which the module stores
  };
  /// Binds the next tensor: its addresses, and whether backward begins its sum.
  /// @throws UsageError if that is not the one that `describe` names now
  [[gnu::noinline]] Bound bind(std::string_view tensor, std::span<std::int64_t const> extents, bool sets = false) {
    if (next != end) {
      auto const number = unit_number(*next);
      auto& unit = scope->unit(number);
      auto const& known = unit.layout().tensors()[tensor_index(*next)];
      auto const prefix = known.name.size() - tensor.size();
      bool const named = known.name.ends_with(tensor) && (prefix == 0 || known.name[prefix - 1] == '.');
      if (named && std::equal(extents.data(), extents.data() + extents.size(), known.shape.data(),
                              known.shape.data() + known.shape.size())) {
        auto const& buffers = scope->buffers(number);
        void* const base = gradients ? buffers.gradients : const_cast<void*>(buffers.parameters);
        auto const index = tensor_index(*next++);
        bool const unwanted = gradients && !scope->wants_gradients(unit);
        if (base == nullptr || (skips && unwanted)) return {nullptr, false};
        auto const element = size_of(gradients ? unit.types().gradient : unit.types().parameter);
        return {static_cast<std::byte*>(base) + static_cast<std::size_t>(known.offset) * element,
                sets && (unwanted || unit.begin_write(index))};
      }
    }
    refuse(tensor, extents);
  }
  [[noreturn, gnu::cold]] void refuse(std::string_view tensor, std::span<std::int64_t const> extents) const {
    fail<UsageError>(
        "describe() of a module names '{}' ({}); at registration it named {}. It must name the same tensors each time "
        "and for every element type",
        tensor, listed(extents), next == end ? "no further tensor" : formatted("'{}'", name()));
  }
  /// @throws UsageError if it named more
  void expect_all() const {
    FSDP_EXPECTS(next == end, "describe() of a module leaves out '{}', which it named at registration", name());
  }
  std::string const& name() const {
    return scope->unit(unit_number(*next)).layout().tensors()[tensor_index(*next)].name;
  }
};

/// Points the tensors of a Params into flat buffers, in the order of `describe`.
/// @tparam T  the element type of the Params
template <class T, class Scope>
struct Binder {
  NamedTensors<Scope>* named;

  template <class Element, std::size_t Rank>
  requires(std::is_same_v<Element, T> || std::is_same_v<Element, in_fp32<T>>) void operator()(
      std::string_view name, Tensor<Element, Rank>& tensor, Extents<Rank> extents, TensorOptions const& = {}) {
    tensor = {static_cast<Element*>(named->bind(name, extents).data), extents};
  }
  template <class Element, std::size_t Rank>
  requires(std::is_same_v<Gradient<Element>, T> || std::is_same_v<Gradient<Element>, in_fp32<T>>) void operator()(
      std::string_view name, Tensor<Gradient<Element>, Rank>& tensor, Extents<Rank> extents,
      TensorOptions const& = {}) {
    auto const bound = named->bind(name, extents, true);
    tensor = {{static_cast<Element*>(bound.data), extents}, bound.fresh};
  }
};

}  // namespace detail

/// A user's module whose parameters live in a unit of an engine. Made by Engine::shard; the engine must outlive it.
template <Module M, class E>
class ShardedModule<M, E> {
 public:
  using Param = typename E::Precision::Param;                                      ///< element type of parameters
  using Reduce = typename E::Precision::Reduce;                                    ///< element type of gradients
  using Weights = typename M::template Params<Param const>;                        ///< parameters that M reads
  using Written = std::conditional_t<SetsGradients<M>, Gradient<Reduce>, Reduce>;  ///< element type of Gradients
  using Gradients = typename M::template Params<Written>;                          ///< gradients that M writes

  /// Made by Engine::shard, which has registered the module. @param added  the module's use and tensors
  ShardedModule(E& engine, M&& module, detail::AddedModule added)
      : module_(std::move(module)), engine_(&engine), use_{added.use, &engine}, tensors_(std::move(added.tensors)) {}
  /// Moves the module. If that throws, `other` is still sharded.
  ShardedModule(ShardedModule&& other) = default;
  ShardedModule& operator=(ShardedModule&& other) = default;  ///< later passes of `other` throw a UsageError

  M const& module() const { return module_; }  ///< the user's module; its parameters are in the unit
  /// The module's use in the declared order, for prefetch lists.
  UseId use() const { return use_; }
  operator UseId() const { return use_; }  ///< the id that use() returns, so that lists of uses can contain the module

  /// Gathers the unit, starts the next units' gathers, enqueues `M::forward(compute, weights, args...)`, and reshards
  /// the unit.
  /// @return what M::forward returns
  /// @throws OrderError if another module was declared next
  /// @note Stream: compute waits for the gather. The calling thread waits for no device work, but for passes long
  /// enqueued: [Note: How far the host runs ahead].
  /// @note Collective: all ranks call the modules in the same order; at most one all-gather for this unit.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    auto& engine = *engine_.get("a sharded module");
    auto const scope = engine.forward_scope(use_);
    return module_.forward(engine.compute(), weights(scope), std::forward<Args>(args)...);
  }

  /// Gathers the unit if it was dropped, enqueues `M::backward(compute, weights, gradients, args...)`, starts the
  /// reduction.
  /// @return what M::backward returns; a value-initialised result, without a call, if nothing at or below this use
  /// trains
  /// @throws OrderError if another module was declared next
  /// @note Stream: compute waits for the gather and for a free gradient slot.
  /// @note Collective: at most one all-gather, and the reduction of the unit (see [Note: Ways to reduce]).
  template <class... Args>
  decltype(auto) backward(Args&&... args) {
    auto& engine = *engine_.get("a sharded module");
    auto const scope = engine.backward_scope(use_);
    auto const call = [&]() -> decltype(auto) {
      return module_.backward(engine.compute(), weights(scope), gradients(scope), std::forward<Args>(args)...);
    };
    using Result = decltype(call());
    static_assert(std::is_void_v<Result> || std::is_default_constructible_v<Result>,
                  "fsdp: backward returns void or a value that can be value-initialised: below the lowest unit that "
                  "trains, it returns such a value");
    if (!scope) return Result();
    return call();
  }

  /// In backward, for a module of a segment (Engine::recompute_segment): enqueues `M::forward(compute, weights,
  /// args...)` again. The unit stays gathered until its backward.
  /// @return what M::forward returns; a value-initialised result, without a call, if backward passes do not come to the
  /// segment
  /// @throws OrderError if another turn comes next, as always if the module is in no segment
  /// @note Collective: at most one all-gather for this unit.
  template <class... Args>
  decltype(auto) recompute(Args&&... args) {
    auto& engine = *engine_.get("a sharded module");
    auto const scope = engine.recompute_scope(use_);
    using Result = decltype(module_.forward(engine.compute(), weights(scope), std::forward<Args>(args)...));
    static_assert(std::is_void_v<Result> || std::is_default_constructible_v<Result>,
                  "fsdp: forward of a recomputed module returns void or a value that can be value-initialised");
    if (!scope) return Result();
    return module_.forward(engine.compute(), weights(scope), std::forward<Args>(args)...);
  }

 private:
  Weights weights(typename E::Scope const& scope) const { return bound<Param const, Weights>(scope, false); }
  Gradients gradients(typename E::Scope const& scope) const { return bound<Written, Gradients>(scope, true); }
  template <class T, class Params>
  Params bound(typename E::Scope const& scope, bool gradients) const {
    Params params;
    bool skips = false;
    if constexpr (SkipsGradients<M>) skips = gradients && module_.skips_gradients;
    detail::NamedTensors<typename E::Scope> tensors{&scope, tensors_.data(), tensors_.data() + tensors_.size(),
                                                    gradients, skips};
    detail::Binder<T, typename E::Scope> binder{&tensors};
    module_.describe(params, binder);
    tensors.expect_all();
    return params;
  }

  M module_;  // before the pointer: see the move constructor
  detail::CheckedPointer<E> engine_;
  UseId use_;
  std::vector<TensorId> tensors_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
