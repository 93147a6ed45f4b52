// SPDX-License-Identifier: Apache-2.0
// A source file that fsdp::compiled adds to a target: functions that read and write files. It has those of JSON and
// safetensors if nlohmann-json is there, and those of checkpoints if xxHash is there too.
#if defined(FSDP_VERSION_NAMESPACE)
#error "compile this file alone: without a precompiled header, and outside of unity builds"
#endif
#define FSDP_DEFINE_CHECKPOINT_BODIES
#include "fsdp/files.hpp"

#if !FSDP_COMPILED
#error "this file is compiled with FSDP_COMPILED=1, as the other files of the target are"
#endif

#if __has_include(<nlohmann/json.hpp>)
#include "fsdp/safetensors.hpp"
#if __has_include(<xxhash.h>)
#include "fsdp/snapshots.hpp"
#endif
#endif
