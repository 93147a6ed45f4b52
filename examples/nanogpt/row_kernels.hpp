// SPDX-License-Identifier: Apache-2.0
// The trainer's kernels, one source for every device: everything between two matrix products.
#pragma once

#include "kernels/activation.hpp"
#include "kernels/column_sums.hpp"
#include "kernels/cross_entropy.hpp"
#include "kernels/dropout.hpp"
#include "kernels/embedding.hpp"
#include "kernels/flash_attention.hpp"
#include "kernels/layer_norm.hpp"
#include "kernels/softmax.hpp"

/// [Note: Conventions of the row kernels]
/// Matrices are row-major without gaps. A: type of activations (float, bf16, fp16, double); W: of weights; G: of
/// weight gradients. Arithmetic, row statistics and partial sums are in Compute<A>: float, or double for double.
/// Backward writes activations' gradients with `=` and weights' gradients with `+=`. Outputs may be the same arrays as
/// inputs of the same shape, unless a comment says otherwise. All launchers only enqueue, do nothing for zero rows, and
/// give bitwise equal results on every run.
