// SPDX-License-Identifier: Apache-2.0
// NCCL's functions, as far as this project calls them.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/standin/nccl/collective.hpp"
#include "tests/standin/nccl/communicator.hpp"
#include "tests/standin/nccl/handles.hpp"
#include "tests/standin/nccl/occupancy.hpp"
#include "tests/standin/nccl/rules.hpp"
#include "tests/standin/nccl/sum.hpp"
#include "tests/standin/runtime/runtime.hpp"
#include "tests/standin/runtime/unseen.hpp"

namespace standin::nccl {
namespace {

bool disjoint(std::byte const* a, std::size_t a_bytes, std::byte const* b, std::size_t b_bytes) {
  return a + a_bytes <= b || b + b_bytes <= a;
}

/// Reports arguments that NCCL cannot use, and some that it would not notice.
ncclResult_t check(Communicator const& communicator, Request const& request, cudaStream_t stream) {
  auto const refuse = [&](std::string const& text) {
    return failed(ncclInvalidArgument, fmt::format("rank {} of {}: {}", communicator.rank, communicator.size, text));
  };
  if (size_of(request.type) == 0) return refuse(fmt::format("data type {}", static_cast<int>(request.type)));
  if (request.operation == Operation::broadcast && (request.root < 0 || request.root >= communicator.size))
    return refuse(fmt::format("root {}", request.root));
  auto const send_bytes = request.send_bytes(communicator.rank, communicator.size);
  auto const receive_bytes = request.receive_bytes(communicator.size);
  if ((request.send == nullptr && send_bytes > 0) || request.receive == nullptr) return refuse("a null buffer");
  if (!request.in_place(communicator.rank) && !disjoint(request.send, send_bytes, request.receive, receive_bytes))
    report(rule("overlapping_buffers"),
           fmt::format("rank {} of {} sends {} bytes from {} and receives {} bytes at {}", communicator.rank,
                       communicator.size, send_bytes, static_cast<void const*>(request.send), receive_bytes,
                       static_cast<void const*>(request.receive)));
  if (int const device = device_of(stream); device != communicator.device) {
    report(rule("collective_stream"), fmt::format("rank {} of {} is on device {}, the stream on device {}",
                                                  communicator.rank, communicator.size, communicator.device, device));
    return refuse("a stream of another device");
  }
  return ncclSuccess;
}

ncclResult_t enqueue_collective(char const* call, ncclComm_t comm, Request const& request, cudaStream_t stream) {
  std::shared_ptr<Collective> collective;
  std::unique_ptr<Entry> entry;  // let go where ThreadSanitizer does not see it
  std::string what;
  auto const leave = [&](ncclResult_t result) {
    Unseen const unseen;
    collective.reset();
    entry.reset();
    return result;
  };
  {
    Unseen const unseen;
    entry = std::make_unique<Entry>(comm, call, Use::work);
    if (!*entry) return leave(entry->status());
    auto& communicator = *entry->communicator();
    if (auto const status = check(communicator, request, stream); status != ncclSuccess) return leave(status);
    if (request.count == 0) return leave(ncclSuccess);
    if (request.send_bytes(communicator.rank, communicator.size) > 0)
      expect_device_operand(communicator.device, request.send, request.send_bytes(communicator.rank, communicator.size),
                            fmt::format("the input of {}", call));
    expect_device_operand(communicator.device, request.receive, request.receive_bytes(communicator.size),
                          fmt::format("the output of {}", call));
    collective = std::make_shared<Collective>(entry->communicator(), request, communicator.sequence.load() + 1);
    what = collective->what();
  }
  // Not hidden: what the caller did until now comes before the collective.
  auto const status = enqueue(
      stream, std::move(what), [running = std::move(collective)] { return running->step(); }, WorkKind::collective);
  Unseen const unseen;
  if (status != cudaSuccess)
    return leave(failed(ncclUnhandledCudaError, fmt::format("{}: {}", call, cudaGetErrorString(status))));
  ++(*entry)->sequence;
  return leave((*entry)->enqueued());
}

ncclResult_t check_sum(ncclRedOp_t reduction) {
  if (reduction == ncclSum) return ncclSuccess;
  auto const text = fmt::format("reduction {}", static_cast<int>(reduction));
  report(rule("unsupported"), text);
  return failed(ncclInvalidArgument, text);
}

ncclResult_t check_config(ncclConfig_t const* config) {
  if (config == nullptr) return ncclSuccess;
  ncclConfig_t const initial = NCCL_CONFIG_INITIALIZER;
  if (config->size != initial.size || config->magic != initial.magic || config->version != initial.version)
    return failed(ncclInvalidArgument, "a configuration that does not begin as NCCL_CONFIG_INITIALIZER");
  if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 && config->blocking != 1)
    return failed(ncclInvalidArgument, fmt::format("config.blocking is {}", config->blocking));
  return ncclSuccess;
}

bool blocks(ncclConfig_t const* config, bool otherwise) {
  return config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise : config->blocking == 1;
}

/// Does what takes long: now, or on a thread of its own for a communicator that does not block.
ncclResult_t run(Communicator& communicator, std::function<ncclResult_t()> action) {
  if (communicator.blocking) return action();
  communicator.begin(std::move(action));
  return ncclInProgress;
}

ncclResult_t split(Communicator& parent, int color, int key, ncclComm_t* made, bool blocking) {
  Communicator::Part part{};
  if (auto const status = parent.divide(color, key, part); status != ncclSuccess) return status;
  if (part.size == 0) return ncclSuccess;
  auto child = std::make_shared<Communicator>(part.rank, part.size, parent.device, blocking);
  if (auto const status = child->join(part.id); status != ncclSuccess) return status;
  *made = make_handle(std::move(child));
  return ncclSuccess;
}

ncclResult_t register_window(Communicator& communicator, std::byte* begin, std::size_t bytes, bool symmetric,
                             ncclWindow_t* made) {
  Mail mail;
  std::strcpy(mail.call.data(), "ncclCommWindowRegister");
  mail.numbers = {static_cast<std::int64_t>(bytes), symmetric ? 1 : 0};
  std::vector<Mail> all;
  if (auto const status = communicator.exchange(mail, all); status != ncclSuccess) return status;
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    if (all[peer].numbers == mail.numbers) continue;
    report(
        rule("window_size"),
        fmt::format("rank {} of {} registers {} bytes with flags {}, rank {} {} bytes with flags {}", communicator.rank,
                    communicator.size, bytes, mail.numbers[1], peer, all[peer].numbers[0], all[peer].numbers[1]));
    return failed(ncclInvalidUsage, "ranks register windows that differ");
  }
  auto const handle = make_window_handle();
  std::scoped_lock const lock(communicator.windows_mutex);
  communicator.windows.emplace(handle, Window{begin, bytes, symmetric});
  *made = handle;
  return ncclSuccess;
}

/// Reports collectives that are not done.
void expect_idle(Communicator const& communicator, std::string_view broken, std::string_view call) {
  auto const flying = communicator.sequence.load() - communicator.finished.load();
  if (flying > 0)
    report(broken, fmt::format("{}: rank {} of {} has {} collectives that are not done", call, communicator.rank,
                               communicator.size, flying));
}

}  // namespace
}  // namespace standin::nccl

using namespace standin::nccl;
using standin::Unseen;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = standin::nccl::version();
  return ncclSuccess;
}

char const* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "a CUDA call failed";
    case ncclSystemError: return "a system call failed";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "a peer failed or is gone";
    case ncclInProgress: return "in progress";
    case ncclNumResults: break;
  }
  return "unknown result";
}

char const* ncclGetLastError(ncclComm_t /*comm*/) {
  Unseen const unseen;
  return last_error();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Unseen const unseen;
  if (id == nullptr) return failed(ncclInvalidArgument, "ncclGetUniqueId of null");
  if (!Shared::make_identifier(*id))
    return failed(ncclSystemError, fmt::format("ncclGetUniqueId: {}", std::strerror(errno)));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  Unseen const unseen;
  standin::count_call("ncclCommInitRankConfig");
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks)
    return failed(ncclInvalidArgument, fmt::format("ncclCommInitRankConfig: rank {} of {}", rank, ranks));
  if (ranks > most_ranks)
    return failed(ncclInvalidArgument, fmt::format("{} ranks: the stand-in has {} at most", ranks, most_ranks));
  if (auto const status = check_config(config); status != ncclSuccess) return status;
  int device = 0;
  if (auto const status = cudaGetDevice(&device); status != cudaSuccess)
    return failed(ncclUnhandledCudaError, fmt::format("cudaGetDevice: {}", cudaGetErrorString(status)));
  auto communicator = std::make_shared<Communicator>(rank, ranks, device, blocks(config, true));
  if (!communicator->blocking) {
    auto& made = *communicator;
    *comm = make_handle(std::move(communicator));
    return run(made, [&made, id] { return made.join(id); });
  }
  *comm = nullptr;
  if (auto const status = communicator->join(id); status != ncclSuccess) return status;
  *comm = make_handle(std::move(communicator));
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommSplit", Use::work);
  if (!entry) return entry.status();
  if (made == nullptr || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
    return failed(ncclInvalidArgument, fmt::format("ncclCommSplit with color {}", color));
  if (auto const status = check_config(config); status != ncclSuccess) return status;
  expect_idle(*entry.communicator(), rule("split_in_flight"), "ncclCommSplit");
  *made = nullptr;
  auto& parent = *entry.communicator();
  bool const blocking = blocks(config, parent.blocking);
  return run(parent, [&parent, color, key, made, blocking] { return split(parent, color, key, made, blocking); });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommFinalize", Use::work);
  if (!entry) return entry.status();
  entry->finalized = true;
  auto& communicator = *entry.communicator();
  return run(communicator, [&communicator] { return communicator.finalize(); });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Unseen const unseen;
  if (comm == nullptr) return ncclSuccess;
  Entry const entry(comm, "ncclCommDestroy", Use::last_work);
  if (!entry) return entry.status();
  expect_idle(*entry.communicator(), rule("destroy_in_flight"), "ncclCommDestroy");
  {
    std::scoped_lock const lock(entry->windows_mutex);
    if (!entry->windows.empty())
      standin::report(rule("window_left"), fmt::format("ncclCommDestroy: rank {} of {} has {} windows", entry->rank,
                                                       entry->size, entry->windows.size()));
  }
  auto const status = entry->finalized.load() ? entry->state.load() : entry->finalize();
  kill_handle(comm);
  return status;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Unseen const unseen;
  if (comm == nullptr) return ncclSuccess;
  Entry const entry(comm, "ncclCommAbort", Use::state);
  if (!entry) return entry.status();
  kill_handle(comm);
  entry->abort();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommGetAsyncError", Use::state);
  if (!entry) return entry.status();
  if (error == nullptr) return failed(ncclInvalidArgument, "ncclCommGetAsyncError into null");
  *error = entry->poll();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t const comm, int* count) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommCount", Use::query);
  if (!entry) return entry.status();
  *count = entry->size;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t const comm, int* device) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommCuDevice", Use::query);
  if (!entry) return entry.status();
  *device = entry->device;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t const comm, int* rank) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommUserRank", Use::query);
  if (!entry) return entry.status();
  *rank = entry->rank;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  Unseen const unseen;
  standin::count_call("ncclMemAlloc");
  return allocate(memory, bytes);
}

ncclResult_t ncclMemFree(void* memory) {
  Unseen const unseen;
  standin::count_call("ncclMemFree");
  return release_memory(memory);
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* made, int flags) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommWindowRegister", Use::work);
  if (!entry) return entry.status();
  if (memory == nullptr || made == nullptr || bytes == 0)
    return failed(ncclInvalidArgument, "ncclCommWindowRegister of nothing");
  auto& communicator = *entry.communicator();
  auto* const begin = static_cast<std::byte*>(memory);
  *made = nullptr;
  if (!expect_window_memory(communicator, memory, bytes))
    return failed(ncclInvalidUsage, "memory that can be no window");
  {
    std::scoped_lock const lock(communicator.windows_mutex);
    for (auto const& [handle, window] : communicator.windows) {
      if (!disjoint(window.begin, window.bytes, begin, bytes))
        standin::report(rule("window_twice"), fmt::format("rank {} of {}: {} bytes at {} overlap a window",
                                                          communicator.rank, communicator.size, bytes, memory));
    }
  }
  bool const symmetric = (flags & NCCL_WIN_COLL_SYMMETRIC) != 0;
  return run(communicator, [&communicator, begin, bytes, symmetric, made] {
    return register_window(communicator, begin, bytes, symmetric, made);
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  Unseen const unseen;
  Entry const entry(comm, "ncclCommWindowDeregister", Use::work);
  if (!entry) return entry.status();
  std::unique_lock lock(entry->windows_mutex);
  auto const found = entry->windows.find(window);
  bool const here = found != entry->windows.end();
  int const uses = here ? found->second.uses : 0;
  if (here) entry->windows.erase(found);
  lock.unlock();
  if (!here) {
    auto const text = fmt::format("rank {} of {}: the window is not this communicator's", entry->rank, entry->size);
    standin::report(rule("window_communicator"), text);
    return failed(ncclInvalidArgument, text);
  }
  if (uses > 0)
    standin::report(rule("window_in_use"),
                    fmt::format("rank {} of {} ends a window that {} buffers of collectives lie in", entry->rank,
                                entry->size, uses));
  return ncclSuccess;
}

ncclResult_t ncclAllGather(void const* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue_collective(
      "ncclAllGather", comm,
      {Operation::all_gather, static_cast<std::byte const*>(send), static_cast<std::byte*>(receive), count, type},
      stream);
}

ncclResult_t ncclReduceScatter(void const* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  if (auto const status = check_sum(reduction); status != ncclSuccess) return status;
  return enqueue_collective(
      "ncclReduceScatter", comm,
      {Operation::reduce_scatter, static_cast<std::byte const*>(send), static_cast<std::byte*>(receive), count, type},
      stream);
}

ncclResult_t ncclAllReduce(void const* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t comm, cudaStream_t stream) {
  if (auto const status = check_sum(reduction); status != ncclSuccess) return status;
  return enqueue_collective(
      "ncclAllReduce", comm,
      {Operation::all_reduce, static_cast<std::byte const*>(send), static_cast<std::byte*>(receive), count, type},
      stream);
}

ncclResult_t ncclBroadcast(void const* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return enqueue_collective(
      "ncclBroadcast", comm,
      {Operation::broadcast, static_cast<std::byte const*>(send), static_cast<std::byte*>(receive), count, type, root},
      stream);
}

}  // extern "C"
