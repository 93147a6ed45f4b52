// SPDX-License-Identifier: Apache-2.0
// The trainer's kernels, one source for every device: everything between two matrix products.
#pragma once

#include "transformer/attention/flash_attention.hpp"
#include "transformer/kernels/activation.hpp"
#include "transformer/kernels/column_sums.hpp"
#include "transformer/kernels/cross_entropy.hpp"
#include "transformer/kernels/dropout.hpp"
#include "transformer/kernels/embedding.hpp"
#include "transformer/kernels/layer_norm.hpp"
#include "transformer/kernels/softmax.hpp"

/// [Note: Conventions of the row kernels]
/// Matrices are row-major without gaps. A: type of activations (float, bf16, fp16, double); W: of weights; G: of
/// weight gradients. Arithmetic, row statistics and partial sums are in Compute<A>: float, or double for double.
/// Backward writes activations' gradients with `=` and weights' gradients with `+=`. Outputs may be the same arrays as
/// inputs of the same shape, unless a comment says otherwise. All launchers only enqueue, do nothing for zero rows, and
/// give bitwise equal results on every run.
