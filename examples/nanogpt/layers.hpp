// SPDX-License-Identifier: Apache-2.0
// All layers of the model, and how they are compiled once.
#pragma once

#include "block.hpp"
#include "embedding.hpp"
#include "head.hpp"
#include "transformer/attention/causal_attention.hpp"

/// [Note: Layers are compiled once]
/// Layers do not depend on the strategy, but their kernels take most of a minute to compile. So the
/// layers are classes whose parameters are the device and the element type alone, and layers_host.cpp and
/// layers_cuda.cu instantiate them. Trainers include layers_host.hpp or layers_cuda.hpp, whose `extern template`
/// lines say that this has been done elsewhere; only `describe`, a template of its own, is compiled with them. A layer
/// that is added here needs its line in each of these files: without it trainers compile it too, and nothing else
/// changes. Tests include gpt.hpp alone where they want layers of their own.
