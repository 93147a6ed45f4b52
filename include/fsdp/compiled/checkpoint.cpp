// SPDX-License-Identifier: Apache-2.0
// The source file that fsdp::compiled adds to a target: files, and checkpoints if nlohmann-json and xxHash are there.
#if defined(FSDP_VERSION_NAMESPACE)
#error "compile this file alone: without a precompiled header, and outside of unity builds"
#endif
#define FSDP_DEFINE_CHECKPOINT_BODIES
#include "fsdp/files.hpp"

#if !FSDP_COMPILED
#error "this file is compiled with FSDP_COMPILED=1, as the other files of the target are"
#endif

#if __has_include(<nlohmann/json.hpp>) && __has_include(<xxhash.h>)
#include "fsdp/snapshots.hpp"
#endif
