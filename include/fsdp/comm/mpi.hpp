// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes of MPI: see comm/mpi/communicator.hpp.
#pragma once

#include "fsdp/comm/mpi/communicator.hpp"
#include "fsdp/compiled.hpp"
#if FSDP_COMPILED_MPI
#include "fsdp/compiled/mpi.hpp"
#endif
