// SPDX-License-Identifier: Apache-2.0
// The numbers of the kernels' block barriers: see fsdp::SyncSite.
#pragma once

#include <array>

#include "fsdp/sync_site.hpp"

namespace nanogpt {

namespace site {

inline constexpr fsdp::SyncSite partials_added{1000};           ///< until columns are summed in wider elements
inline constexpr fsdp::SyncSite logits_gradient_written{1001};  ///< until a row is written, before its target changes

}  // namespace site

/// Every site of the example.
inline constexpr std::array<fsdp::NamedSyncSite, 2> sync_sites{{
    {site::partials_added, "partials_added"},
    {site::logits_gradient_written, "logits_gradient_written"},
}};

}  // namespace nanogpt
