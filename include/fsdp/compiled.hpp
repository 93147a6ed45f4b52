// SPDX-License-Identifier: Apache-2.0
// Whether files are compiled for fsdp::compiled, which has compiled much of the library: see [Note: Compiled once].
#pragma once

#include "fsdp/version.hpp"

// Set by CMake's targets, to the same in all files of a target.
#if !defined(FSDP_COMPILED)
#define FSDP_COMPILED 0  ///< 1: the target links fsdp::compiled
#endif
#if !defined(FSDP_COMPILED_MPI)
#define FSDP_COMPILED_MPI 0  ///< 1: and fsdp::compiled_mpi
#endif

/// Before the definition of a function that fsdp::compiled has, and that headers define for everybody else. Weak: a
/// program may have it of several targets.
#if FSDP_COMPILED
#define FSDP_BODY [[gnu::weak]]
#else
#define FSDP_BODY inline
#endif
