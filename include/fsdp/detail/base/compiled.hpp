// SPDX-License-Identifier: Apache-2.0
// Settings of targets that link fsdp::compiled, which contains template instances and functions: see [Note: Compiled
// once].
#pragma once

#include "fsdp/version.hpp"

// Set by CMake's targets, to the same in all files of a target.
#if !defined(FSDP_COMPILED)
#define FSDP_COMPILED 0  ///< 1: the target links fsdp::compiled
#endif
#if !defined(FSDP_COMPILED_MPI)
#define FSDP_COMPILED_MPI 0  ///< 1: and fsdp::compiled_mpi
#endif

/// Whether this source defines the functions without template parameters that read and write files: checkpoints, their
/// JSON, safetensors. In a target that links fsdp::compiled, compiled/checkpoint.cpp alone does.
#if !FSDP_COMPILED || defined(FSDP_DEFINE_CHECKPOINT_BODIES)
#define FSDP_CHECKPOINT_BODIES 1
#else
#define FSDP_CHECKPOINT_BODIES 0
#endif

/// Marks the definition of a function that fsdp::compiled contains and that headers define for other targets. It is
/// weak, because a program may link several targets that contain it. Its declaration is not marked: with a weak one,
/// a program without the definition would link.
#if FSDP_COMPILED
#define FSDP_BODY [[gnu::weak]]
#else
#define FSDP_BODY inline
#endif
