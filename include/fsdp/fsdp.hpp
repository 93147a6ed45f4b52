// SPDX-License-Identifier: Apache-2.0
// The core of fsdp. Add a device and a communicator: fsdp/host/device.hpp or fsdp/cuda/device.hpp, and one of
// fsdp/comm/.
#pragma once

#include "fsdp/adopted_unit.hpp"
#include "fsdp/checkpoint/full_state.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/engine.hpp"
#include "fsdp/engine/module_buffers.hpp"
#include "fsdp/mesh.hpp"
#include "fsdp/optim/adamw.hpp"
#include "fsdp/optim/grad_clip.hpp"
#include "fsdp/optim/grad_norm.hpp"
#include "fsdp/optim/grad_scaler.hpp"
#include "fsdp/optim/sgd.hpp"
#include "fsdp/precision.hpp"
#include "fsdp/sharded_module.hpp"
#include "fsdp/step/memory_plan.hpp"
#include "fsdp/step/program_text.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"
