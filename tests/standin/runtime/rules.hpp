// SPDX-License-Identifier: Apache-2.0
// The rules of CUDA's runtime that the stand-in holds programs to.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace standin {

/// Sources: "Guide" is NVIDIA's CUDA C++ Programming Guide (13.0), by section; "API" the CUDA Runtime API reference
/// (13.0), by module or function. "strict" means that CUDA allows it, or leaves it undefined, and the stand-in does
/// not.
struct Rule {
  std::string_view name, sentence, source;
};

inline constexpr std::array rules{
    Rule{"dead_handle", "a stream or event is used between its creation and its destruction",
         "API, Stream Management, cudaStreamDestroy; Event Management, cudaEventDestroy"},
    Rule{"default_stream", "no work goes to the default stream, which waits for other streams and makes them wait",
         "strict; Guide, Implicit Synchronization and Default Stream"},
    Rule{"launch_device", "a kernel goes to a stream of the device that is current",
         "Guide, Multi-Device System, Stream and Event Behavior"},
    Rule{"set_device", "memory is set on a stream of the device that is current",
         "strict: the guide's section Stream and Event Behavior allows it for copies and says nothing of cudaMemset"},
    Rule{"record_device", "an event is recorded on a stream of its own device",
         "Guide, Multi-Device System, Stream and Event Behavior"},
    Rule{"unrecorded_event", "what is waited for, or asked about, was recorded",
         "strict; API, Event Management, cudaEventQuery, cudaEventSynchronize: an event that was never recorded counts "
         "as done; Stream Management, cudaStreamWaitEvent: does nothing then"},
    Rule{"untimed_event", "elapsed time is asked of events that keep times, were recorded and are of one device",
         "API, Event Management, cudaEventElapsedTime; Guide, Stream and Event Behavior"},
    Rule{"grid", "a grid has 1 to 2^31 - 1 blocks in x, 1 to 65535 in y and z; here y and z are 1",
         "Guide, Compute Capabilities, table Technical Specifications per Compute Capability"},
    Rule{"threads", "a block has 1 to 1024 threads, whole warps here, and not more than the kernel's launch bounds",
         "Guide, table Technical Specifications per Compute Capability; Launch Bounds"},
    Rule{"shared_memory",
         "more than 48 KiB of dynamic shared memory are asked for by cudaFuncSetAttribute first, on each device; 227 "
         "KiB "
         "are the most",
         "Guide, Compute Capability 9.x, Shared Memory; API, Execution Control, cudaFuncSetAttribute"},
    Rule{"parameters", "a kernel's parameters have at most 32764 bytes", "Guide, __global__ Function Parameters"},
    Rule{"unknown_kernel", "what is launched is a kernel", "API, Execution Control, cudaLaunchKernelExC"},
    Rule{"launch_attributes", "launches have no attributes, which the stand-in does not know", "strict"},
    Rule{"kernel_argument", "pointers that a kernel gets are of its device's memory, of pinned memory, or of a peer's",
         "Guide, Peer-to-Peer Memory Access; strict for pageable memory, which some systems can read"},
    Rule{"kernel_failure", "the threads of a block meet at the barriers and in the operations of their warp",
         "Guide, Synchronization Functions, Warp Shuffle Functions"},
    Rule{"freed_memory", "memory is used before it is freed", "API, Memory Management, cudaFree, cudaFreeHost"},
    Rule{"freed_while_pending", "memory is freed when the work that was given it is done",
         "strict for pinned memory: API, cudaFreeHost promises no wait; and for work of other devices, which cudaFree "
         "does "
         "not wait for: Guide, Implicit Synchronization"},
    Rule{"wild_free", "what is freed is what an allocation gave, once",
         "API, Memory Management, cudaFree, cudaFreeHost"},
    Rule{"out_of_range", "an operation stays within one allocation", "API, Memory Management, cudaMemcpyAsync"},
    Rule{"copy_kind", "the kind of a copy says where its ends are", "API, Memory Management, cudaMemcpyAsync"},
    Rule{"overlapping_copy", "the ends of a copy do not overlap", "API, Memory Management, cudaMemcpyAsync"},
    Rule{"overrun", "nothing is written beside an allocation", "Guide, Device Memory Accesses"},
    Rule{"free_waits_for_collective",
         "memory is not freed while a collective is under way: cudaFree waits for the device, and the peers that the "
         "collective waits for may be about to free too",
         "Guide, Implicit Synchronization; NCCL User Guide, Troubleshooting, CUDA memory allocation"},
    Rule{"device_operand", "an operand lies in one allocation that the device may touch",
         "Guide, Unified Virtual Address Space, Peer-to-Peer Memory Access"},
    Rule{"bad_access", "device code touches what is allocated",
         "Guide, Device Memory Accesses; API, cudaErrorIllegalAddress"},
    Rule{"host_access", "the host touches no device memory", "Guide, Heterogeneous Programming"},
    Rule{"throwing_work", "what a stand-in enqueues throws nothing", "the stand-ins' own"},
};

/// The name of a rule, which must be one of the table.
template <std::size_t N>
consteval std::string_view name_in(std::array<Rule, N> const& table, std::string_view name) {
  for (auto const& known : table) {
    if (known.name == name) return known.name;
  }
  throw "the table of rules has no rule of this name";
}
/// rule("grid")
consteval std::string_view rule(std::string_view name) { return name_in(rules, name); }

}  // namespace standin
