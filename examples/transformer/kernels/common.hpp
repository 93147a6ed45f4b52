// SPDX-License-Identifier: Apache-2.0
// Parts that the row kernels share.
#pragma once

#include <cstdint>

#include "fsdp/concepts.hpp"
#include "fsdp/kernels.hpp"

namespace transformer {

using fsdp::Compute;

namespace detail {

using fsdp::kernels::chunk_elements;
using fsdp::kernels::detail::blocks_for;
using fsdp::kernels::detail::chunk_length;

}  // namespace detail
}  // namespace transformer
