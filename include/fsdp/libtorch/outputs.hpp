// SPDX-License-Identifier: Apache-2.0
// The tensors in what a module's forward returns.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>
#include <type_traits>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch {

namespace detail {

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept OptionalLike = requires(T const& value) {
  value.has_value();
  *value;
};
template <class T>
concept RangeLike = requires(T const& value) {
  value.begin();
  value.end();
};
struct Ignore {
  void operator()(at::Tensor const&) const {}
};
/// A type of the user's with a function visit_tensors(value, f) in its namespace, which calls f(tensor) for each
/// tensor.
template <class T>
concept VisitsTensors = requires(T const& value, Ignore const& f) {
  visit_tensors(value, f);
};
template <class T>
inline constexpr bool has_no_tensors =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> || std::is_null_pointer_v<T>;

}  // namespace detail

/// Calls `f(tensor)` for each tensor in `value`: a tensor, a tuple, pair, array, vector, map or optional of these, or a
/// type with a function `visit_tensors(T const&, F const&)` of its own. A tensor that is left out would get no hook,
/// and its unit would reduce gradients that are not complete: other types do not compile.
template <class T, class F>
void each_tensor(T const& value, F const& f) {
  if constexpr (std::is_convertible_v<T const&, at::Tensor const&>) {
    f(static_cast<at::Tensor const&>(value));
  } else if constexpr (detail::VisitsTensors<T>) {
    visit_tensors(value, f);
  } else if constexpr (detail::has_no_tensors<T>) {
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&](auto const&... part) { (each_tensor(part, f), ...); }, value);
  } else if constexpr (detail::OptionalLike<T>) {
    if (value.has_value()) each_tensor(*value, f);
  } else if constexpr (detail::RangeLike<T>) {
    for (auto const& part : value) each_tensor(part, f);
  } else {
    static_assert(detail::VisitsTensors<T>,
                  "fsdp: forward of a sharded module returns a type in which fsdp does not find the tensors. Give the "
                  "type's namespace a function template <class F> void visit_tensors(T const& value, F const& f) that "
                  "calls f(tensor) for each tensor");
  }
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch
