// SPDX-License-Identifier: Apache-2.0
// Interface of the stand-in for the CUDA runtime, for the stand-ins of cuBLASLt and NCCL: its streams, its memory, its
// reports. Programs under test call CUDA's own functions.
//
// The stand-ins execute programs written for GPUs on machines without one. They are linked instead of NVIDIA's
// libraries, are compiled against NVIDIA's headers, and are stricter than what they stand for: what CUDA leaves
// undefined, or forgives, is reported.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace standin {

/// Work that a stream was given. Called by whoever runs the stream, with the rights of its device; called again, later,
/// as long as it returns false: so waits for a peer block neither a thread nor other streams.
using Work = std::function<bool()>;

/// Whether work waits for other devices' or processes' streams: to free memory while such work is under way is
/// reported.
enum class WorkKind : unsigned char { local, collective };

/// Appends work to a stream. It sees what was enqueued before it on this stream, what the calling thread did before
/// this call, and what events carried to the stream; under ThreadSanitizer these are the only edges.
/// @param what   names it in reports: "cublasLtMatmul 64 x 32 x 16"
/// @return       what CUDA's own functions return: the sticky error, a wrong stream or device. Then nothing was
/// enqueued.
cudaError_t enqueue(cudaStream_t stream, std::string what, Work work, WorkKind kind = WorkKind::local);

/// The device that a stream belongs to.
int device_of(cudaStream_t stream);

enum class MemoryKind : unsigned char { device, pinned };
/// An allocation that the runtime stand-in made.
struct Region {
  MemoryKind kind;
  int device;  ///< that owns it, or that was current when pinned memory was allocated
  std::byte* begin;
  std::size_t bytes;
};
/// The allocation that an address lies in; none for the host's own memory and for what was freed.
std::optional<Region> region_of(void const* address);

/// Reports an operand that is not what device code on `device` may touch: outside every allocation, beyond its
/// allocation's end, of a peer that was not enabled, pageable host memory.
/// @param what  "operand A of cublasLtMatmul"
void expect_device_operand(int device, void const* begin, std::size_t bytes, std::string_view what);

/// Device memory made without cudaMalloc, as NCCL's allocator does: counted, filled with NaN, out of the host's reach.
cudaError_t allocate_device(void** memory, std::size_t bytes);
cudaError_t free_device(void* memory);

/// A rule was broken. Prints "standin: RULE: TEXT" and ends the process by abort(), unless a handler takes it.
/// @param rule  a name of the table of rules
void report(std::string_view rule, std::string const& text);
/// For tests: gets reports instead. nullptr: aborts again. @return the one before
using Handler = void (*)(std::string_view rule, std::string const& text);
Handler set_handler(Handler handler);

/// The calling thread does something that makes a context on its current device, as calls of CUDA's do (Guide,
/// Initialization), and those of NCCL, which choose the communicator's device and then the caller's again.
void use_current_device();
/// For tests: whether anything was done while `device` was current.
bool has_context(int device);

/// A device fails: this and every later call that concerns it gives `error`.
void fail_device(int device, cudaError_t error);

/// For tests: how often a function of CUDA's was called ("cudaMalloc"), how often the host waited for a stream, event
/// or device, and what is allocated now.
std::int64_t calls(std::string_view function);
std::int64_t synchronizations();
/// Calls by name of the function, NCCL's among them; what is counted besides: how often the host waited, and copies
/// that may make it wait.
using Counts = std::map<std::string_view, std::int64_t>;
inline constexpr std::string_view host_waits = "waits of the host", pageable_copies = "copies of pageable memory";
/// Calls of the calling thread so far.
Counts calls_of_thread();
/// Counts a call of a library whose stand-in is not the runtime. The name lives for ever.
void count_call(std::string_view function);
struct Allocated {
  std::int64_t device, device_bytes, pinned, pinned_bytes;
};
Allocated allocated();
/// Streams and events that were made and not destroyed.
std::int64_t handles();

/// Edges that ThreadSanitizer shall know, as between the ranks of a collective; nothing without it.
void release(void* tag);
void acquire(void* tag);

}  // namespace standin
