// SPDX-License-Identifier: Apache-2.0
// Optimizer state and gradients in host memory.
#pragma once

#include <type_traits>

#include "fsdp/engine.hpp"
#include "fsdp/engine/offloading.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

struct OffloadOptions {
  bool moments = false;     ///< of all optimizers of the engine
  bool masters = false;     ///< fp32 masters of narrower parameters; a shard of parameters stays on the device
  bool gradients = false;   ///< gradient shards, between their reduction and their use
  bool parameters = false;  ///< refused: gathers need a shard on the device
};

/// Keeps state in host memory, page-locked on CUDA: see [Note: Offloading]. Call it before the engine is sealed.
/// Results are the same, bit by bit; with gradients offloaded, see docs/finetuning.md for a sum over several
/// micro-steps in a unit that no other rank shares. MemoryPlan::host and MemoryTag::offloaded are the bytes in host
/// memory. A device of your own whose kernels cannot read all host memory needs allocate_pinned (PinsMemory): norms and
/// averages read there.
/// @throws UsageError if the engine is sealed or offloads already, or `options` names nothing; ConfigError if it names
/// parameters, or masters that are the parameters
/// @note Collective: no; but all ranks offload the same, which sealing compares.
template <class E>
[[gnu::cold]] void offload(E& engine, OffloadOptions const& options) {
  auto const shards = engine.shards();
  auto const turn = shards.enter("offload");
  auto& core = shards.core();
  core.expect_unsealed("state was offloaded", "call offload");
  auto const rank = engine.rank();
  FSDP_EXPECTS(!core.offload, "rank {}: offload was called twice; name everything in one call", rank);
  if (options.parameters)
    fail<ConfigError>(
        "rank {}: offload: parameters stay on the device, sharded: gathers read them (PyTorch's offload_params). "
        "Offload moments, masters or gradients",
        rank);
  if (options.masters && std::is_same_v<typename E::Master, typename E::Param>)
    fail<ConfigError>(
        "rank {}: offload: masters are the parameters here, of type {}; they can be offloaded under a policy with "
        "narrower parameters, such as fsdp::Bf16",
        rank, name(dtype_of<typename E::Master>));
  FSDP_EXPECTS(options.moments || options.masters || options.gradients,
               "rank {}: offload: the options name nothing; set moments, masters or gradients", rank);
  using Core = std::remove_reference_t<decltype(core)>;
  core.offload = detail::Owned<detail::OffloadHooks>(new detail::Offloading<Core>(core));
  core.declared.offload = {options.moments, options.masters, options.gradients};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
