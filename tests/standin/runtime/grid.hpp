// SPDX-License-Identifier: Apache-2.0
// How the stand-in runs a kernel's blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/standin/runtime/kernels.hpp"
#include "tests/standin/runtime/state.hpp"
#include "tests/support/emulated_block.hpp"

namespace standin {

/// A fault of a kernel in a thread block.
using BlockFailure = emulated::Failure;

/// The work of a launch: block after block, as tests/support/emulated_block.hpp runs them. With a seed, threads run in
/// orders drawn from it.
Work grid(CUstream_st& stream, int threads, std::size_t shared_bytes, std::int64_t blocks, Body body,
          std::uint64_t seed);

}  // namespace standin
