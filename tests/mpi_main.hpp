// SPDX-License-Identifier: Apache-2.0
// The main function of test programs that run under mpirun.
#pragma once

#include "fsdp/detail/mpi/environment.hpp"

/// MPI of this test program; starts with main().
fsdp::mpi::Environment& test_environment();
