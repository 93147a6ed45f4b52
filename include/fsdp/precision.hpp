// SPDX-License-Identifier: Apache-2.0
// Element types of parameters, gradients and master weights.
#pragma once

#include <type_traits>

#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// An element type of a precision policy.
template <class T>
inline constexpr bool is_precision_type =
    std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;

/// Element types of one engine, each float, bf16 or fp16 (docs/numerics.md has the table).
/// @tparam ParamT   what forward and backward read: the type of the gather buffers
/// @tparam ReduceT  what backward writes: the type of the gradient slots; the collectives sum it, or what it is rounded
///                  to (EngineOptions::reduce_dtype)
/// @tparam MasterT  what the optimizer updates and checkpoints read: the type of the parameter shards
/// Gradient shards are fp32: micro-steps accumulate there.
template <class ParamT, class ReduceT, class MasterT = float>
struct Precision {
  static_assert(is_precision_type<ParamT> && is_precision_type<ReduceT> && is_precision_type<MasterT>,
                "fsdp::Precision takes float, fsdp::bf16 or fsdp::fp16 as parameter, reduction and master type");
  using Param = ParamT;
  using Reduce = ReduceT;
  using Master = MasterT;
};

/// A precision policy: an argument of Engine.
template <class P>
concept PrecisionPolicy = is_precision_type<typename P::Param> && is_precision_type<typename P::Reduce> &&
    is_precision_type<typename P::Master>;

/// The element types of one unit.
struct ElementTypes {
  DType parameter = DType::f32;  ///< of the parameters that forward and backward read
  DType gradient = DType::f32;   ///< of the gradients that backward writes
  DType master = DType::f32;     ///< of the parameter shard
  friend constexpr bool operator==(ElementTypes const&, ElementTypes const&) = default;
};

using Fp32 = Precision<float, float>;
using Bf16 = Precision<bf16, float>;       ///< bf16 compute, fp32 reduction
using Bf16Reduce = Precision<bf16, bf16>;  ///< bf16 compute, bf16 reduction
using Fp16 = Precision<fp16, fp16>;        ///< fp16 compute and reduction: train with a GradScaler

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
