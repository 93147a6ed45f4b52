// SPDX-License-Identifier: Apache-2.0
// Arithmetic of reductions.
#pragma once

#include <nccl.h>

#include <cstddef>

namespace standin::nccl {

/// Bytes of an element; 0 for what is no type.
std::size_t size_of(ncclDataType_t type);
char const* name_of(ncclDataType_t type);

/// into[i] += from[i], rounded to the type each time.
/// @return false if there is no sum of this type
bool add(ncclDataType_t type, std::byte* into, std::byte const* from, std::size_t count);

}  // namespace standin::nccl
