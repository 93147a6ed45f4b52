// SPDX-License-Identifier: Apache-2.0
// forward and backward of one user module, around the movement of its unit.
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
#include "fsdp/engine/moved_pointer.hpp"
#include "fsdp/engine/user_checks.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/layout.hpp"

namespace fsdp {

namespace detail {

/// Collects what `describe` says into a layout.
struct Registrar {
  std::string_view prefix;
  FlatLayout* layout;
  std::vector<std::size_t>* tensors;

  template <class T, std::size_t Rank>
  [[gnu::cold]] void operator()(std::string_view tensor, Tensor<T, Rank>&, Extents<Rank> extents,
                                TensorOptions options = {}) const {
    auto full_name = prefix.empty() ? std::string(tensor) : formatted("{}.{}", prefix, tensor);
    layout->add(declared_tensor(std::move(full_name), {extents.begin(), extents.end()}, options), *tensors);
  }
};

/// The tensors that a module named when it was registered, one after the other.
struct NamedTensors {
  FlatLayout const* layout;
  std::size_t const* next;
  std::size_t const* end;

  /// @return the index of the next one in the layout
  /// @throws UsageError if that is not the one that `describe` names now
  [[gnu::noinline]] std::size_t take(std::string_view tensor, std::span<std::int64_t const> extents) {
    if (next != end) {
      auto const& known = layout->tensors()[*next];
      auto const prefix = known.name.size() - tensor.size();
      bool const named = known.name.ends_with(tensor) && (prefix == 0 || known.name[prefix - 1] == '.');
      if (named && std::equal(extents.begin(), extents.end(), known.shape.begin(), known.shape.end())) return *next++;
    }
    refuse(tensor, extents);
  }
  [[noreturn, gnu::cold]] void refuse(std::string_view tensor, std::span<std::int64_t const> extents) const {
    fail<UsageError>(
        "describe() of a module names '{}' ({}); at registration it named {}. It must name the same tensors each time "
        "and for every element type",
        tensor, listed(extents), next == end ? "no further tensor" : formatted("'{}'", layout->tensors()[*next].name));
  }
  /// @throws UsageError if it named more
  void expect_all() const {
    FSDP_EXPECTS(next == end, "describe() of a module leaves out '{}', which it named at registration",
                 layout->tensors()[*next].name);
  }
};

/// Points the tensors of a Params into a flat buffer, in the order of `describe`.
template <class Element>
struct Binder {
  Element* base;
  NamedTensors* named;

  template <std::size_t Rank>
  void operator()(std::string_view name, Tensor<Element, Rank>& tensor, Extents<Rank> extents,
                  TensorOptions const& = {}) {
    auto const offset = named->layout->tensors()[named->take(name, extents)].offset;
    tensor = {base == nullptr ? nullptr : base + offset, extents};
  }
};

/// The same for gradients of which `scope` says whether they are fresh.
template <class T, class Scope>
struct GradientBinder {
  T* base;  ///< nullptr: no gradient is wanted
  Scope const* scope;
  NamedTensors* named;

  template <std::size_t Rank>
  void operator()(std::string_view name, Tensor<Gradient<T>, Rank>& tensor, Extents<Rank> extents,
                  TensorOptions const& = {}) {
    auto const index = named->take(name, extents);
    if (base == nullptr) {
      tensor = {{nullptr, extents}, false};
    } else {
      tensor = {{base + scope->layout().tensors()[index].offset, extents}, scope->begin_gradient(index)};
    }
  }
};

}  // namespace detail

/// A user's module whose parameters live in a unit of an engine. Made by Engine::shard; the engine must outlive it.
template <Module M, class E>
class ShardedModule<M, E> {
 public:
  using Param = typename E::Precision::Param;
  using Reduce = typename E::Precision::Reduce;
  using Weights = typename M::template Params<Param const>;
  using Gradients = typename M::template Params<std::conditional_t<SetsGradients<M>, Gradient<Reduce>, Reduce>>;

  ShardedModule(E& engine, M module, UseId use, std::vector<std::size_t> tensors)
      : engine_(&engine), module_(std::move(module)), use_(use), tensors_(std::move(tensors)) {}
  ShardedModule(ShardedModule&&) noexcept = default;
  ShardedModule& operator=(ShardedModule&&) noexcept = default;

  M const& module() const { return module_; }
  /// Its turn in the declared order: what prefetch lists name.
  UseId use() const { return use_; }
  operator UseId() const { return use_; }

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
  /// @note Collective: at most one all-gather, and the reduction of the unit (see Reducer::reduce).
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

 private:
  detail::NamedTensors named(typename E::Scope const& scope) const {
    return {&scope.layout(), tensors_.data(), tensors_.data() + tensors_.size()};
  }
  Weights weights(typename E::Scope const& scope) const {
    Weights bound;
    auto tensors = named(scope);
    detail::Binder<Param const> binder{scope.parameters(), &tensors};
    module_.describe(bound, binder);
    tensors.expect_all();
    return bound;
  }
  Gradients gradients(typename E::Scope const& scope) const {
    Gradients bound;
    auto tensors = named(scope);
    auto* base = scope.gradients();
    if constexpr (SkipsGradients<M>)
      if (M::skips_gradients && scope.is_frozen()) base = nullptr;
    if constexpr (SetsGradients<M>) {
      detail::GradientBinder<Reduce, typename E::Scope> binder{base, &scope, &tensors};
      module_.describe(bound, binder);
    } else {
      detail::Binder<Reduce> binder{base, &tensors};
      module_.describe(bound, binder);
    }
    tensors.expect_all();
    return bound;
  }

  detail::MovedPointer<E> engine_;
  M module_;
  UseId use_;
  std::vector<std::size_t> tensors_;
};

}  // namespace fsdp
