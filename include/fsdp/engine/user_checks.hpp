// SPDX-License-Identifier: Apache-2.0
// Compile-time checks of user code. A mistake gives one sentence, at the line that has it.
#pragma once

#include <type_traits>

#include "fsdp/arithmetic.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {

/// [Note: Overloads that are refused] A braced list of options converts to nothing if one of its names is misspelt, and
/// compilers then list every overload that there is. An overload with an ellipsis takes it, is worse than every other
/// one, and is deleted: the error is one sentence, and the cited line names the expected arguments.
/// If no argument is left for `...`, a parameter of type Anything still ranks this overload last.
struct Anything {
  template <class T>
  Anything(T&&);  // NOLINT(bugprone-forwarding-reference-overload): never defined
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
