// SPDX-License-Identifier: Apache-2.0
// All layers of the model, and the means to compile them once.
#pragma once

#include "block.hpp"
#include "embedding.hpp"
#include "head.hpp"

/// [Note: Layers are compiled once]
/// What a layer computes does not depend on the strategy, but its kernels take most of a minute to compile. So the
/// trainers only see declarations of the layers' passes (layers_host.hpp, layers_cuda.hpp), and layers_*.cpp and
/// layers_*.cu instantiate them, once for each device and type. Tests include
/// gpt.hpp alone where they want layers of their own.
///
/// Every pass of every layer: of device D, in T, with gradients Params<G>.
/// @param how  `extern template` or `template`
#define NANOGPT_LAYERS(how, D, T, G)                                                                      \
  how class Embedding<D, T>;                                                                              \
  how class CausalAttention<D, T>;                                                                        \
  how class Block<D, T>;                                                                                  \
  how class Head<D, T>;                                                                                   \
  how void Embedding<D, T>::backward(Stream&, Params<T const> const&, Params<G> const&, Pass const&,      \
                                     std::int32_t const*, T*) const;                                      \
  how void Block<D, T>::backward(Stream&, Params<T const> const&, Params<G> const&, Pass const&,          \
                                 BlockActivations<T> const&, T*) const;                                   \
  how void Head<D, T>::backward(Stream&, Params<T const> const&, Params<G> const&, Pass const&, T const*, \
                                NormStatistics<Compute<T>> const&, Evaluate const&, double, double, T*) const;
