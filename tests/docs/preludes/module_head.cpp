// SPDX-License-Identifier: Apache-2.0
// The beginning of a module.
#include <cstdint>

#include "fsdp/fsdp.hpp"

// BLOCK
};
static_assert(fsdp::Module<Mlp>);
