// SPDX-License-Identifier: Apache-2.0
// Registers modules by their `describe`, for engines and plans. Mistakes in user code give one sentence, at the line
// that has it; a call that throws leaves nothing behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/arithmetic.hpp"
#include "fsdp/detail/engine/declaration.hpp"
#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/options.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// While it lives, calls that declare something, or seal, throw a UsageError.
/// @tparam D  Declaration
template <class D>
class [[nodiscard]] Busy {
 public:
  /// @param with    what is under way, a literal
  /// @param action  this call, for the message
  /// @throws UsageError if something else is under way
  [[gnu::cold]] Busy(D& declared, std::string_view with, std::string_view action) : declared_(&declared) {
    declared.expect_idle(action);
    declared.set_busy(with);
  }
  Busy(Busy&&) = delete;
  ~Busy() { declared_->set_busy({}); }

 private:
  D* declared_;
};

/// Guards the registration of modules. If an exception ends the scope, they are forgotten.
template <class D>
class [[nodiscard]] Rollback {
 public:
  /// @param to  the unit that the modules are added to, if that is there already
  [[gnu::cold]] Rollback(D& declared, UnitId to) : declared_(&declared), before_(declared.save_point(to)) {}
  Rollback(Rollback&&) = delete;
  [[gnu::cold]] ~Rollback() {
    if (is_failing()) declared_->roll_back(before_);
  }
  /// In a destructor: an exception ends the scope.
  bool is_failing() const { return std::uncaught_exceptions() > exceptions_; }

 private:
  D* declared_;
  std::vector<std::size_t> before_;
  int exceptions_ = std::uncaught_exceptions();
};

/// A Rollback for one call of the engine, which refuses other declarations until the call ends.
template <class D>
class [[nodiscard]] Transaction {
 public:
  /// @param module  for messages
  /// @param to      as in Rollback
  /// @throws UsageError if something else is under way
  [[gnu::cold]] Transaction(D& declared, std::string_view module, UnitId to = {})
      : busy_(declared, "a module is being added", formatted("module '{}' was added", module)),
        rollback_(declared, to) {}
  Transaction(Transaction&&) = delete;

 private:
  Busy<D> busy_;
  Rollback<D> rollback_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// [Note: Overloads that are refused] A braced list of options converts to nothing if one of its names is misspelt, and
/// compilers then list every overload that there is. An overload with an ellipsis takes it, is worse than every other
/// one, and is deleted: the error is one sentence, and the cited line names the expected arguments.
/// If no argument is left for `...`, a parameter of type LastResort still ranks this overload last.
struct LastResort {
  template <class T>
  LastResort(T&&);  // NOLINT(bugprone-forwarding-reference-overload): never defined
};

/// Reasons why a type is no Module.
enum class ModuleFault : unsigned char { none, params, describe, constant, order, element, copy };

template <class M>
constexpr ModuleFault module_fault() {
  if constexpr (!requires {
                  typename M::template Params<float>;
                  typename M::template Params<float const>;
                }) {
    return ModuleFault::params;
  } else {
    using Gradients = typename M::template Params<float>;
    using Weights = typename M::template Params<float const>;
    constexpr bool gradients = requires(M const& m, Gradients& p, ProbeVisitor& tensor) { m.describe(p, tensor); };
    constexpr bool weights = requires(M const& m, Weights& p, ProbeVisitor& tensor) { m.describe(p, tensor); };
    if constexpr (DescribesCopies<M>) return ModuleFault::copy;
    if constexpr (gradients && weights) return ModuleFault::none;
    if constexpr (gradients || weights) return ModuleFault::element;
    if constexpr (requires(M & m, Gradients & p, ProbeVisitor & tensor) { m.describe(p, tensor); })
      return ModuleFault::constant;
    if constexpr (requires(M & m, Gradients & p, ProbeVisitor & tensor) { m.describe(tensor, p); })
      return ModuleFault::order;
    return ModuleFault::describe;
  }
}

/// @throws ConfigError if a file of this program that includes fsdp was compiled with a flag that changes results: see
/// [Note: Flags without a macro]
inline void expect_exact_arithmetic(int rank) {
  if (fast_math_file.name == nullptr) return;
  fail<ConfigError>(
      "rank {}: '{}' includes fsdp and was compiled with {} or a flag that implies it, which changes floating-point "
      "results. Move the code that includes fsdp into a source file of its own, and compile that without the flag "
      "(docs/adopting.md, 'Trainers compiled with -Ofast'), or give up bitwise equal results with "
      "-DFSDP_ALLOW_FAST_MATH",
      rank, fast_math_file.name, fast_math_file.flag);
}

}  // namespace detail

/// Result of Engine::shard for a type that is no Module. Its assertions give the reason; it adds no other error.
template <class M, class E>
class ShardedModule {
  using Fault = detail::ModuleFault;
  static constexpr Fault fault = detail::module_fault<M>();
  static_assert(
      fault != Fault::params,
      "fsdp: the module has no member template <class T> struct Params, which holds its fsdp::Tensor<T, Rank>");
  static_assert(fault != Fault::describe,
                "fsdp: the module has no public member template <class T, class Visit> void describe(Params<T>& p, "
                "Visit&& tensor) const, which calls tensor(name, p.member, {extents...}) for each tensor");
  static_assert(
      fault != Fault::copy,
      "fsdp: the module's describe takes a copy of its Params; it sets their tensors, so it takes Params<T>&");
  static_assert(fault != Fault::constant, "fsdp: the module's describe must be const");
  static_assert(fault != Fault::order,
                "fsdp: the module's describe has its arguments swapped: describe(Params<T>& p, Visit&& tensor)");
  static_assert(fault != Fault::element,
                "fsdp: the module's describe takes Params of one element type only: weights and gradients differ in "
                "theirs, so it is template <class T, class Visit> void describe(Params<T>& p, Visit&& tensor) const");

 public:
  template <class... Args>
  void forward(Args&&...) {}
  template <class... Args>
  void backward(Args&&...) {}
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Adds the tensors of `describe` to a declaration.
template <class Declaration>
struct TensorDeclarer {
  std::string_view prefix;
  UnitId unit;
  Declaration* declaration;
  std::vector<TensorId>* tensors;
  bool sets = false, skips = false;  ///< the module's promises: see Declaration::add_tensor

  template <class T, std::size_t Rank>
  void operator()(std::string_view tensor, Tensor<T, Rank>&, Extents<Rank> extents,
                  TensorOptions const& options = {}) const {
    constexpr bool fp32 = std::is_same_v<T, DeclaredFp32>;
    static_assert(fp32 || std::is_same_v<T, Declared>,
                  "fsdp: tensors in a module's Params<T> are fsdp::Tensor<T, Rank>, or fsdp::Tensor<fsdp::in_fp32<T>, "
                  "Rank> for those that are fp32 in every precision");
    add(tensor, {extents.begin(), extents.end()}, options, fp32);
  }
  [[gnu::cold, gnu::noinline]] void add(std::string_view tensor, std::vector<std::int64_t> shape,
                                        TensorOptions const& options, bool fp32) const;
};

template <class Declaration>
void TensorDeclarer<Declaration>::add(std::string_view tensor, std::vector<std::int64_t> shape,
                                      TensorOptions const& options, bool fp32) const {
  auto full_name = prefix.empty() ? std::string(tensor) : formatted("{}.{}", prefix, tensor);
  declaration->add_tensor(unit, {std::move(full_name), std::move(shape), options, skips, sets}, fp32, *tensors);
}

/// A module's declared use, and the places of its tensors.
struct AddedModule {
  std::size_t use;  ///< in the declared order
  std::vector<TensorId> tensors;
};

/// Adds a module: its tensors to a unit and those beside it, and its use. If it throws, the declaration is to be
/// restored: see Transaction.
template <class Declaration, class M>
[[gnu::cold]] AddedModule register_module(Declaration& declaration, UnitId unit, M const& user_module,
                                          std::string_view prefix) {
  std::vector<TensorId> tensors;
  typename M::template Params<Declared> unbound;
  TensorDeclarer<Declaration> declarer{prefix, unit, &declaration, &tensors};
  if constexpr (SetsGradients<M>) declarer.sets = user_module.sets_gradients;
  if constexpr (SkipsGradients<M>) declarer.skips = user_module.skips_gradients;
  user_module.describe(unbound, declarer);
  return {declaration.add_use(unit, prefix, tensors), std::move(tensors)};
}

/// Adds a use without a module. @param places  gets the place of each tensor @return the use's number
template <class Declaration>
[[gnu::cold]] std::size_t register_use(Declaration& declaration, UnitId unit, std::string_view module,
                                       std::vector<DeclaredTensor> tensors, std::vector<TensorId>& places) {
  std::vector<TensorId> added;
  for (auto& tensor : tensors) declaration.add_tensor(unit, std::move(tensor), false, added);
  auto const use = declaration.add_use(unit, module, added);
  places = std::move(added);
  return use;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
