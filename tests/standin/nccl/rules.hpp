// SPDX-License-Identifier: Apache-2.0
// The rules of NCCL that the stand-in holds programs to.
#pragma once

#include <array>
#include <string_view>

#include "tests/standin/runtime/rules.hpp"

namespace standin::nccl {

/// Sources: "Guide" is the NCCL User Guide (2.28), by section or function; "nccl.h" its header. "strict" means that
/// NCCL allows it, or leaves it undefined, and the stand-in does not.
inline constexpr std::array rules{
    Rule{"collective_mismatch",
         "all ranks of a communicator make the same calls in the same order, with equal count, type, root and "
         "reduction; "
         "GPUs hang, or exchange garbage, where they do not",
         "Guide, Collective Operations"},
    Rule{"overlapping_buffers",
         "a collective's buffers are apart, or lie where the operation in place wants them: all-gather sends from "
         "receive + rank * count, reduce-scatter receives at send + rank * count, the others use one address",
         "Guide, In-place Operations; nccl.h"},
    Rule{"collective_stream", "a collective goes to a stream of its communicator's device",
         "Guide, CUDA Stream Semantics; Creating a Communicator"},
    Rule{"dead_communicator", "a communicator is used between its creation and its destruction, abort or finalization",
         "Guide, ncclCommDestroy, ncclCommAbort, ncclCommFinalize"},
    Rule{"call_in_progress", "a communicator in the state ncclInProgress is asked for its state, and nothing else",
         "Guide, Asynchronous errors and error handling; Nonblocking Group Operation"},
    Rule{"concurrent_calls", "one thread at a time calls NCCL for a communicator, but for its state and to abort it",
         "Guide, Thread Safety"},
    Rule{"destroy_in_flight",
         "a communicator is destroyed when its collectives are done: to flush them, NCCL lets the host wait for peers",
         "strict; Guide, ncclCommDestroy, ncclCommFinalize"},
    Rule{"split_in_flight", "a communicator is split when its collectives are done", "Guide, ncclCommSplit"},
    Rule{"identifier_reuse", "an identifier serves one communicator, and each of its ranks once",
         "Guide, ncclGetUniqueId, ncclCommInitRank"},
    Rule{"window_memory", "a window is device memory of the communicator's device from NCCL's allocator",
         "Guide, User Buffer Registration, Window Registration, Memory Allocator"},
    Rule{"window_alignment", "a window begins and ends at multiples of NCCL_WIN_REQUIRED_ALIGNMENT", "nccl.h; strict"},
    Rule{"window_size", "a symmetric window has one size on all ranks", "Guide, ncclCommWindowRegister"},
    Rule{"window_twice", "memory is in one window of a communicator", "Guide, ncclCommWindowRegister"},
    Rule{"window_communicator", "a window is ended on the communicator that began it, once",
         "Guide, ncclCommWindowDeregister"},
    Rule{"window_in_use", "a window is ended when no collective uses it", "Guide, ncclCommWindowDeregister"},
    Rule{"window_left", "a communicator's windows are ended before it is destroyed",
         "strict; Guide, ncclCommWindowDeregister"},
    Rule{"window_freed", "memory is freed after its windows have ended", "strict; Guide, ncclCommWindowDeregister"},
    Rule{"window_offset", "where one rank's buffer lies in a symmetric window, every rank's does, at the same offset",
         "Guide, User Buffer Registration; Window Registration"},
    Rule{"wild_free", "ncclMemFree gets what ncclMemAlloc gave, once", "Guide, ncclMemFree"},
    Rule{"unsupported", "the stand-in knows sums, and no other reduction", "the stand-in's own"},
};

/// rule("overlapping_buffers")
consteval std::string_view rule(std::string_view name) { return name_in(rules, name); }

}  // namespace standin::nccl
