// SPDX-License-Identifier: Apache-2.0
// What the layers of a model share.
#pragma once

#include "transformer/attention/causal_attention.hpp"
#include "transformer/layers/activation_plan.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/math/gemm.hpp"
#include "transformer/tuning/tuning.hpp"

namespace transformer {

/// What all layers of a model share. It must outlive them and stay in its place.
/// @tparam Config     the model's shape
/// @tparam Workspace  scratch of its layers
template <class D, class T, class Config, class Workspace>
struct LayerContext {
  D device;
  Gemm<D>* gemm = nullptr;
  Config config;
  ActivationPlan plan;
  Workspace workspace;
  Tuning tuning;
  AttentionContext<D, T> attention;
  Adapters<D, T> adapters;
  Classifier<D, T> classifier;
};

}  // namespace transformer
