// SPDX-License-Identifier: Apache-2.0
// Buffers of sharded torch modules (running means of a BatchNorm) in checkpoints. No part of fsdp/libtorch.hpp.
#pragma once

#include <torch/torch.h>

#include "fsdp/checkpoint/json.hpp"
#include "fsdp/checkpoint/module_buffers.hpp"
#include "fsdp/libtorch/module_buffers.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch {

/// The buffers of a Sharder's modules: their names, types, shapes and bytes. A checkpoint keeps rank 0's, once:
/// `sharder.sync_buffers()`, then `fsdp::save(engine, adamw, folder, {{"buffers", buffers(sharder)}})`.
/// @tparam Sharder  fsdp::libtorch::Sharder
/// @note Collective: no.
template <class Sharder>
checkpoint::Json buffers(Sharder const& sharder) {
  detail::TorchBufferList const buffers(sharder.engine(), sharder.modules());
  return buffers_to_json(sharder.engine(), buffers.list());
}

/// Sets the buffers of a Sharder's modules to what buffers() returned, on any number of ranks: `load_buffers(sharder,
/// loaded.extra["buffers"])`.
/// @throws ConfigError if a buffer is missing, or has another type or shape: no buffer has changed then
/// @note Collective: no; all ranks call it.
template <class Sharder>
void load_buffers(Sharder const& sharder, checkpoint::Json const& saved) {
  detail::TorchBufferList buffers(sharder.engine(), sharder.modules());
  buffers_from_json(sharder.engine(), buffers.list(), saved);
  buffers.written();
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch
