// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes of MPI, on the host in fp32: see [Note: Compiled once]. fsdp/comm/mpi.hpp includes it by
// itself.
#pragma once

#include "fsdp/comm/mpi/communicator.hpp"
#include "fsdp/compiled.hpp"
#include "fsdp/compiled/instances.hpp"

#define FSDP_MPI_INSTANCES(how)                                          \
  FSDP_COMMUNICATOR_INSTANCES(how, mpi::BasicCommunicator<host::Device>) \
  FSDP_ENGINE_INSTANCES(how, mpi::BasicCommunicator<host::Device>, Fp32)

#if FSDP_COMPILED_MPI
namespace fsdp::inline FSDP_VERSION_NAMESPACE {
FSDP_DEVICE_INSTANCES(extern template, host::Device, Fp32)
FSDP_MPI_INSTANCES(extern template)
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
#endif
