// SPDX-License-Identifier: Apache-2.0
// A second translation unit: the core alone. Linking both finds definitions that are not inline.
#include <fsdp/fsdp.hpp>

int core_answer() { return static_cast<int>(fsdp::size_of(fsdp::DType::f32)) - 1; }
