// SPDX-License-Identifier: Apache-2.0
// Which element types parameters, gradients and master weights have.
#pragma once

#include "fsdp/tensor.hpp"

namespace fsdp {

/// Element types of one engine.
/// @tparam ParamT   what forward and backward read: the type of the gather buffers
/// @tparam ReduceT  what backward writes and the collectives sum: the type of the gradient slots
/// Master weights, gradient shards and optimizer state are fp32.
template <class ParamT, class ReduceT>
struct Precision {
  using Param = ParamT;
  using Reduce = ReduceT;
  using Master = float;
};

using Fp32 = Precision<float, float>;
using Bf16 = Precision<bf16, float>;  ///< bf16 compute, fp32 reduction

}  // namespace fsdp
