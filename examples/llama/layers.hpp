// SPDX-License-Identifier: Apache-2.0
// All layers of the model. nanogpt's layers.hpp says how they are compiled once.
#pragma once

#include "block.hpp"
#include "embedding.hpp"
#include "head.hpp"
#include "transformer/attention/causal_attention.hpp"
