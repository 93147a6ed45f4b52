// SPDX-License-Identifier: Apache-2.0
// The end of a module.
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"

using Stream = fsdp::host::Stream;
struct Mlp {
  template <class T>
  struct Params {};
  // BLOCK
