// SPDX-License-Identifier: Apache-2.0
// A former path of communicator.hpp, for one version.
#pragma once

#if defined(__GNUC__)
#pragma GCC warning "fsdp/mesh.hpp is fsdp/communicator.hpp now"
#endif
#include "fsdp/communicator.hpp"
