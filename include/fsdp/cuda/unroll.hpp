// SPDX-License-Identifier: Apache-2.0
// Loop pragmas for device code, which host code ignores.
#pragma once

#include "fsdp/version.hpp"

#if defined(__CUDA_ARCH__)
#define FSDP_UNROLL _Pragma("unroll")
#define FSDP_UNROLL_BY_4 _Pragma("unroll 4")
#define FSDP_ROLLED _Pragma("unroll 1")
#else
#define FSDP_UNROLL
#define FSDP_UNROLL_BY_4
#define FSDP_ROLLED
#endif
