// SPDX-License-Identifier: Apache-2.0
// Modules are registered by their `describe`: engines and plans do it with the same code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/declared_units.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::detail {

/// Adds what `describe` says to a declaration.
template <class Declaration>
struct Registrar {
  std::string_view prefix;
  UnitId unit;
  Declaration* declaration;
  std::vector<TensorPlace>* tensors;
  bool sets = false, skips = false;  ///< what the module promises: see Declaration::add_tensor

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
                                        TensorOptions const& options, bool fp32) const {
    auto full_name = prefix.empty() ? std::string(tensor) : formatted("{}.{}", prefix, tensor);
    declaration->add_tensor(unit, {std::move(full_name), std::move(shape), options, skips, sets}, fp32, *tensors);
  }
};

/// Adds the tensors of a module to a unit and those beside it. If it throws, the declaration is to be restored: see
/// DeclaredUnits::Attempt.
/// @return the place of each tensor
template <class Declaration, class M>
[[gnu::cold]] std::vector<TensorPlace> register_module(Declaration& declaration, UnitId unit, M const& user_module,
                                                       std::string_view prefix) {
  std::vector<TensorPlace> tensors;
  typename M::template Params<Declared> unbound;
  Registrar<Declaration> registrar{prefix, unit, &declaration, &tensors};
  if constexpr (SetsGradients<M>) registrar.sets = user_module.sets_gradients;
  if constexpr (SkipsGradients<M>) registrar.skips = user_module.skips_gradients;
  user_module.describe(unbound, registrar);
  declaration.end_module(unit, tensors);
  return tensors;
}

}  // namespace fsdp::detail
