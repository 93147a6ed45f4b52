// SPDX-License-Identifier: Apache-2.0
// The core of fsdp. Add a device (fsdp/host.hpp or fsdp/cuda.hpp) and a communicator (fsdp/local.hpp, fsdp/mpi.hpp or
// fsdp/nccl.hpp).
#pragma once

#include "fsdp/adopted_unit.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/engine.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/gradients.hpp"
#include "fsdp/module_buffers.hpp"
#include "fsdp/optimizers.hpp"
#include "fsdp/program.hpp"
#include "fsdp/sharded_module.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"
