// SPDX-License-Identifier: Apache-2.0
// A former path of mpi.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/comm/mpi.hpp is fsdp/mpi.hpp now"
#endif
#include "fsdp/mpi.hpp"
