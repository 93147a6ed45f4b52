// SPDX-License-Identifier: Apache-2.0
// Context that all layers of a model share.
#pragma once

#include "transformer/attention/causal_attention.hpp"
#include "transformer/layers/activation_plan.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/layers/shape.hpp"
#include "transformer/math/gemm.hpp"
#include "transformer/tuning/tuning.hpp"

namespace transformer {

/// Context that all layers of a model share. It must outlive them and stay in its place.
/// @tparam Config     the model's shape
/// @tparam Workspace  scratch of its layers; its members `attention`, `adapters` and `head` are defined in this folder
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

  LayerContext(D const& on, Gemm<D>* products, Config const& of, DecoderShape const& shape, ActivationPlan const& room,
               Workspace const& scratch, Tuning const& trained)
      : device(on),
        gemm(products),
        config(of),
        plan(room),
        workspace(scratch),
        tuning(trained),
        attention{on, products, room.attention(shape.attention), scratch.attention},
        adapters{products, trained.lora_scale, scratch.adapters},
        classifier{
            on,          products, shape.width, shape.vocabulary, room.logits_rows(padded_vocabulary(shape.vocabulary)),
            scratch.head} {}
};

}  // namespace transformer
