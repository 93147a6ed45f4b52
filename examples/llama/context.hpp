// SPDX-License-Identifier: Apache-2.0
// Context that all layers of a Llama share: shape, workspace, products.
#pragma once

#include "activations.hpp"
#include "llama_config.hpp"
#include "transformer/layers/context.hpp"

namespace llama {

template <class D, class T>
using Context = LayerContext<D, T, LlamaConfig, Workspace<T>>;

}  // namespace llama
