// SPDX-License-Identifier: Apache-2.0
// What test programs that run under mpirun get from their main function.
#pragma once

#include "fsdp/comm/mpi/environment.hpp"

/// MPI of this test program; starts with main().
fsdp::mpi::Environment& test_environment();
