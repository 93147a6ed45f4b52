// SPDX-License-Identifier: Apache-2.0
// The source file that fsdp::compiled_mpi adds to a target: ranks as processes of MPI.
#include "fsdp/mpi.hpp"

#if !FSDP_COMPILED || !FSDP_COMPILED_MPI
#error "this file is compiled with FSDP_COMPILED=1 and FSDP_COMPILED_MPI=1, as the other files of the target are"
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE {
FSDP_MPI_INSTANCES(template)
}
