// SPDX-License-Identifier: Apache-2.0
// Checksums of checkpoints: XXH64 of each block, so that a reader checks only the blocks that it reads.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

inline std::uint64_t checksum_of(std::span<std::byte const> bytes) { return XXH64(bytes.data(), bytes.size(), 0); }
inline std::uint64_t checksum_of(std::string_view text) { return checksum_of(std::as_bytes(std::span(text))); }

/// A checksum as written in files: 16 hexadecimal digits.
inline std::string checksum_text(std::uint64_t checksum) { return formatted("{:016x}", checksum); }

/// Bytes that one checksum covers: a slice's last block may be shorter.
inline constexpr std::int64_t block_bytes = std::int64_t{1} << 20;

constexpr std::int64_t block_count(std::int64_t bytes) { return (bytes + block_bytes - 1) / block_bytes; }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
