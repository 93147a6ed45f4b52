// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace trainer {

/// Whether the calling thread takes subnormal results as zero.
bool flushes_subnormals();
/// Copies bits: no arithmetic, so that every way of compiling gives the same.
void copy(float const* from, float* to, std::int64_t n);
/// A sum whose order is the compiler's to choose.
float sum(float const* x, std::int64_t n);

}  // namespace trainer
