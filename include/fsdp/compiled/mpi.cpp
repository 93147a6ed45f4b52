// SPDX-License-Identifier: Apache-2.0
// The library fsdp::compiled_mpi, which needs fsdp::compiled.
#include "fsdp/compiled/mpi.hpp"

#if !FSDP_COMPILED || !FSDP_COMPILED_MPI
#error "fsdp::compiled_mpi is compiled with FSDP_COMPILED=1 and FSDP_COMPILED_MPI=1, as the program's files are"
#endif

namespace fsdp {
FSDP_MPI_INSTANCES(template)
}
