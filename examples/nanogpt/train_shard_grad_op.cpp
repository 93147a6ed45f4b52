// SPDX-License-Identifier: Apache-2.0
// run_rank for strategy shard_grad_op, on the host.
#include "fsdp/comm/local.hpp"
#include "fsdp/host/device.hpp"
#include "layers_host.hpp"
#include "run_rank.hpp"
#if NANOGPT_HAVE_MPI
#include "fsdp/comm/mpi.hpp"
#endif

namespace nanogpt {

template int run_rank<fsdp::ShardGradOp, fsdp::Fp32>(fsdp::local::Communicator<fsdp::host::Device>, Job const&);
#if NANOGPT_HAVE_MPI
template int run_rank<fsdp::ShardGradOp, fsdp::Fp32>(fsdp::mpi::Communicator, Job const&);
#endif

}  // namespace nanogpt
