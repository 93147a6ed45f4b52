// SPDX-License-Identifier: Apache-2.0
// mpi.h without the C++ bindings that MPI removed in version 3.
#pragma once

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include "fsdp/version.hpp"
