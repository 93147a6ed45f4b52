// SPDX-License-Identifier: Apache-2.0
// What the layers of a model share.
#pragma once

#include "activations.hpp"
#include "gpt_config.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/math/gemm.hpp"
#include "transformer/tuning/tuning.hpp"

namespace nanogpt {

/// What all layers of a model share. It must outlive them and stay in its place.
template <class D, class T>
struct Context {
  D device;
  Gemm<D>* gemm = nullptr;
  GptConfig config;
  ActivationPlan plan;
  Workspace<T> workspace;
  Tuning tuning{};
  AttentionContext<D, T> attention;
};

}  // namespace nanogpt
