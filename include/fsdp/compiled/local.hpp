// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads, on the host in fp32: see [Note: Compiled once]. fsdp/comm/local.hpp includes it by itself.
#pragma once

#include "fsdp/comm/local/communicator.hpp"
#include "fsdp/comm/local/run.hpp"
#include "fsdp/compiled.hpp"
#include "fsdp/compiled/instances.hpp"
#include "fsdp/host/device.hpp"

#define FSDP_LOCAL_INSTANCES(how)                                     \
  how struct local::detail::Published<host::Device>;                  \
  how class local::detail::Group<host::Device>;                       \
  how class local::detail::Member<host::Device>;                      \
  how struct local::detail::RankGroups<host::Device>;                 \
  how class local::detail::Run<host::Device>;                         \
  FSDP_COMMUNICATOR_INSTANCES(how, local::Communicator<host::Device>) \
  FSDP_DEVICE_INSTANCES(how, host::Device, Fp32)                      \
  FSDP_ENGINE_INSTANCES(how, local::Communicator<host::Device>, Fp32)

#if FSDP_COMPILED
namespace fsdp::inline FSDP_VERSION_NAMESPACE {
FSDP_LOCAL_INSTANCES(extern template)
}
#endif
