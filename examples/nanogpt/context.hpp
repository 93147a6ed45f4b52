// SPDX-License-Identifier: Apache-2.0
// Context that all layers of a GPT share: shape, workspace, products.
#pragma once

#include "activations.hpp"
#include "gpt_config.hpp"
#include "transformer/layers/context.hpp"

namespace nanogpt {

template <class D, class T>
using Context = LayerContext<D, T, GptConfig, Workspace<T>>;

}  // namespace nanogpt
