// SPDX-License-Identifier: Apache-2.0
// The numbers of the kernels' block barriers: see fsdp::SyncSite.
#pragma once

#include <array>

#include "fsdp/kernels/sync_site.hpp"

namespace nanogpt {

namespace site {

inline constexpr fsdp::SyncSite partials_exchanged{1000};       ///< until every warp's part of a sum is in its slot
inline constexpr fsdp::SyncSite logits_gradient_written{1001};  ///< until a row is written, before its target changes
inline constexpr fsdp::SyncSite layer_norm_sums{1002};       ///< until the warps' sums of some rows are in their slots
inline constexpr fsdp::SyncSite flash_forward_first{1010};   ///< until the queries and the first keys are there
inline constexpr fsdp::SyncSite flash_forward_next{1011};    ///< until the next keys are there and the last are read
inline constexpr fsdp::SyncSite flash_forward_staged{1012};  ///< until a warp's results are in shared memory
inline constexpr fsdp::SyncSite flash_queries_first{1013};   ///< as flash_forward_first
inline constexpr fsdp::SyncSite flash_queries_next{1014};    ///< as flash_forward_next
inline constexpr fsdp::SyncSite flash_queries_staged{1015};  ///< until a warp's dQ is in shared memory
inline constexpr fsdp::SyncSite flash_keys_first{1016};      ///< until the keys and the first queries are there
inline constexpr fsdp::SyncSite flash_keys_next{1017};       ///< until the next queries are there and the last are read
inline constexpr fsdp::SyncSite flash_keys_staged{1018};     ///< until a warp's dK is in shared memory
inline constexpr fsdp::SyncSite flash_values_staged{1019};   ///< until a warp's dV is in shared memory

}  // namespace site

/// Every site of the example.
inline constexpr std::array<fsdp::NamedSyncSite, 13> sync_sites{{
    {site::partials_exchanged, "partials_exchanged"},
    {site::logits_gradient_written, "logits_gradient_written"},
    {site::layer_norm_sums, "layer_norm_sums"},
    {site::flash_forward_first, "flash_forward_first"},
    {site::flash_forward_next, "flash_forward_next"},
    {site::flash_forward_staged, "flash_forward_staged"},
    {site::flash_queries_first, "flash_queries_first"},
    {site::flash_queries_next, "flash_queries_next"},
    {site::flash_queries_staged, "flash_queries_staged"},
    {site::flash_keys_first, "flash_keys_first"},
    {site::flash_keys_next, "flash_keys_next"},
    {site::flash_keys_staged, "flash_keys_staged"},
    {site::flash_values_staged, "flash_values_staged"},
}};

}  // namespace nanogpt
