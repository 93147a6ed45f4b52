// SPDX-License-Identifier: Apache-2.0
// Registers modules by their `describe`, for engines and plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/declared_units.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Adds the tensors of `describe` to a declaration.
template <class Declaration>
struct Registrar {
  std::string_view prefix;
  UnitId unit;
  Declaration* declaration;
  std::vector<TensorPlace>* tensors;
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
                                        TensorOptions const& options, bool fp32) const {
    auto full_name = prefix.empty() ? std::string(tensor) : formatted("{}.{}", prefix, tensor);
    declaration->add_tensor(unit, {std::move(full_name), std::move(shape), options, skips, sets}, fp32, *tensors);
  }
};

/// A module's declared use, and the places of its tensors.
struct AddedModule {
  std::size_t use;  ///< in the declared order
  std::vector<TensorPlace> tensors;
};

/// Adds a module: its tensors to a unit and those beside it, and its use. If it throws, the declaration is to be
/// restored: see Attempt.
template <class Declaration, class M>
[[gnu::cold]] AddedModule register_module(Declaration& declaration, UnitId unit, M const& user_module,
                                          std::string_view prefix) {
  std::vector<TensorPlace> tensors;
  typename M::template Params<Declared> unbound;
  Registrar<Declaration> registrar{prefix, unit, &declaration, &tensors};
  if constexpr (SetsGradients<M>) registrar.sets = user_module.sets_gradients;
  if constexpr (SkipsGradients<M>) registrar.skips = user_module.skips_gradients;
  user_module.describe(unbound, registrar);
  return {declaration.add_use(unit, prefix, tensors), std::move(tensors)};
}

/// Adds a use without a module. @param places  gets the place of each tensor @return the use's number
template <class Declaration>
[[gnu::cold]] std::size_t register_use(Declaration& declaration, UnitId unit, std::string_view module,
                                       std::vector<DeclaredTensor> tensors, std::vector<TensorPlace>& places) {
  std::vector<TensorPlace> added;
  for (auto& tensor : tensors) declaration.add_tensor(unit, std::move(tensor), false, added);
  auto const use = declaration.add_use(unit, module, added);
  places = std::move(added);
  return use;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
