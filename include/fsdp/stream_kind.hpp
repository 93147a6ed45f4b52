// SPDX-License-Identifier: Apache-2.0
// Kinds of streams of an engine.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// `copy` moves optimizer state between host and device. It is there if something is offloaded.
enum class StreamKind : unsigned char { compute, gather, reduce, replicate, copy, count_ };
inline constexpr auto stream_kinds = static_cast<std::size_t>(StreamKind::count_);

inline constexpr std::array<std::string_view, stream_kinds> stream_names{"compute", "gather", "reduce", "replicate",
                                                                         "copy"};
constexpr std::string_view name(StreamKind kind) { return stream_names[static_cast<std::size_t>(kind)]; }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
