// SPDX-License-Identifier: Apache-2.0
// A communicator of processes with one GPU each, over NCCL.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/cuda.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/nccl/state.hpp"
#include "fsdp/detail/nccl/watch.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl {

/// Model of fsdp::Communicator for processes with one GPU each.
///
/// Sums are NCCL's: their order depends on the algorithm that it picks, so results are not promised to be bitwise equal
/// to those of other communicators. In place, every collective moves data without a copy of the whole.
///
/// [Note: NCCL and peers that still read] `wait_for_peers` does nothing. A collective of NCCL completes on a rank's
/// stream only when the rank's input has been consumed: it was copied into transport buffers, or peers that read it
/// directly have passed the barrier with which such kernels end. What follows it on the stream may overwrite the input.
///
/// All ranks must enqueue the collectives of all their communicators in one order, as the engine does. Nothing but
/// Options::check_order and the deadline notices where they do not. Collectives also start in that order: see [Note:
/// Several communicators on one device] in detail/nccl/state.hpp, which sets NCCL_LAUNCH_ORDER_IMPLICIT.
///
/// A communicator that was moved from can be destroyed, assigned to, and nothing else: calls throw a UsageError.
class Communicator {
 public:
  using Device = cuda::Device;                      ///< the GPU whose memory is moved
  using Stream = cuda::Stream;                      ///< streams of the GPU, on which collectives run
  static constexpr std::string_view name = "nccl";  ///< kind of communicator

  /// The ranks of a run started with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun does;
  /// without them one rank. LOCAL_RANK chooses the device; a machine with one GPU needs none.
  /// @throws ConfigError, PeerError, ResourceError "no CUDA device: ..."
  /// @note Collective: yes; blocks.
  static Communicator from_environment(Options options = {}) {
    auto const place = bootstrap::Environment::read();
    cuda::require_device();
    if (place.local_rank < 0 && place.size > 1 && cuda::device_count() > 1)
      fail<ConfigError>(
          "rank {}: LOCAL_RANK is not set, and there are {} GPUs to choose from; set it to this rank's number on its "
          "machine, from 0 on",
          place.rank, cuda::device_count());
    return from_environment(cuda::Device(std::max(place.local_rank, 0)), options);
  }
  /// A world that the environment describes, on a device chosen by the caller.
  static Communicator from_environment(cuda::Device device, Options options = {}) {
    auto const place = bootstrap::Environment::read();
    auto state = std::make_unique<State>(device, place.rank, place.size, options);
    state->control.emplace(place, options.timeout);
    state->connect(*state->control);
    return Communicator(std::move(state));
  }
  /// The ranks of `control`: anything with rank(), size() and exchange(text, what), such as an mpi::Communicator. It
  /// serves to pass NCCL's identifier on, and is not used afterwards.
  /// @note Collective: yes, over control; blocks.
  template <class Control>
  static Communicator from(Control& control, cuda::Device device, Options options = {}) {
    auto state = std::make_unique<State>(device, control.rank(), control.size(), options);
    state->connect(control);
    return Communicator(std::move(state));
  }
  /// Uses the caller's communicator, which must outlive this one and is not destroyed. Streams of the caller are
  /// adopted by cuda::Stream::adopt.
  static Communicator adopt(ncclComm_t comm, Options options = {}) {
    FSDP_EXPECTS(comm != nullptr, "nccl::Communicator::adopt: expected an ncclComm_t, got nullptr");
    detail::check_options(options);
    int ordinal = 0;
    int rank = 0;
    int size = 0;
    FSDP_NCCL_CHECK(comm, ncclCommCuDevice(comm, &ordinal));
    FSDP_NCCL_CHECK(comm, ncclCommUserRank(comm, &rank));
    FSDP_NCCL_CHECK(comm, ncclCommCount(comm, &size));
    auto state = std::make_unique<State>(cuda::Device(ordinal), rank, size, options);
    state->use(comm);
    return Communicator(std::move(state));
  }

  int rank() const { return state().rank; }                      ///< this process's rank, from 0
  int size() const { return state().size; }                      ///< number of ranks
  cuda::Device const& device() const { return state().device; }  ///< this rank's GPU
  /// NCCL's handle; null in a group of one rank that was not adopted.
  ncclComm_t get() const { return state().comm; }
  /// The collective in which this rank waits now, for messages; "" if nothing is pending.
  std::string pending() const {
    if (!state().watch) return "";
    state_->device.make_current();
    return state_->watch->pending();
  }

  /// Ranks of equal color form a new communicator, ordered by key, then by rank, with resources of its own: the two
  /// progress independently.
  /// @param what the name of the new communicators, for messages: equal on all ranks
  /// @pre color >= 0
  /// @throws OrderError on every rank if some do something else
  /// @note Collective: yes; blocks until this communicator's collectives are done.
  Communicator split(int color, int key, std::string_view what) {
    FSDP_EXPECTS(color >= 0, "rank {}: split '{}': expected a color of 0 or more, got {}", rank(), what, color);
    auto& parent = state();
    if (parent.comm == nullptr) return Communicator(std::make_unique<State>(parent.device, 0, 1, parent.options));
    parent.device.make_current();
    if (parent.watch) parent.watch->drain();  // NCCL wants no collective in flight
    static_cast<void>(ask_first_rank({}, comm::split_of(what), comm::no_text));
    auto config = detail::make_config(parent.options);
    ncclComm_t made = nullptr;
    {
      auto const phase = parent.phase({.call = "ncclCommSplit"});
      FSDP_NCCL_CHECK(parent.comm, ncclCommSplit(parent.comm, color, key, &made, &config));
    }
    UniqueComm owned(made);
    int new_rank = 0;
    int new_size = 0;
    FSDP_NCCL_CHECK(made, ncclCommUserRank(made, &new_rank));
    FSDP_NCCL_CHECK(made, ncclCommCount(made, &new_size));
    auto state = std::make_unique<State>(parent.device, new_rank, new_size, parent.options);
    state->owned = std::move(owned);
    state->use(made);
    if (parent.control) state->control.emplace(parent.control->split(color, key, what));
    return Communicator(std::move(state));
  }

  /// Device memory; with Options::symmetric_memory NCCL's.
  /// @throws ResourceError
  /// @note Collective: no.
  void* allocate(std::size_t bytes) { return state().allocate(bytes); }
  /// @pre other communicators that the memory was registered with have ended
  /// @note Collective: no. May wait for the device to be idle.
  void deallocate(void* memory, std::size_t bytes) noexcept {
    if (state_ != nullptr) state_->deallocate(memory, bytes);
  }
  /// With Options::symmetric_memory, collectives of this communicator treat `memory` as symmetric, until it is
  /// deallocated here or this communicator ends. Communicators split from this one need a call of their own. Without
  /// the option, does nothing.
  /// @param memory  a result of allocate(bytes), here or on the communicator that this was split from
  /// @throws ConfigError if sizes differ between ranks, or the memory cannot be registered
  /// @note Collective: yes with symmetric_memory, and blocks.
  void register_memory(void* memory, std::size_t bytes) { state().register_memory(memory, bytes); }

  /// Gathers every rank's `count` elements, in rank order, into `recv` (size() * count). In place: `send == recv +
  /// rank() * count`.
  /// @note Collective: yes; each rank receives (size() - 1) * count elements.
  template <class T>
  Ticket all_gather(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    auto const offset = static_cast<std::size_t>(rank()) * count;
    return enqueue<T>(stream, Collective::all_gather, send, recv, recv + offset, count, 0, label, [&](auto handle) {
      FSDP_NCCL_CHECK(get(), ncclAllGather(send, recv, count, detail::type_of<T>(), get(), handle));
    });
  }
  /// Sums `send` (size() * count) over ranks; slice rank() of the sum goes to `recv` (count). In place: `recv == send +
  /// rank() * count`.
  /// @note Collective: yes; each rank sends (size() - 1) * count elements.
  template <class T>
  Ticket reduce_scatter(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return enqueue<T>(stream, Collective::reduce_scatter, send, recv, recv, count, 0, label, [&](auto handle) {
      FSDP_NCCL_CHECK(get(), ncclReduceScatter(send, recv, count, detail::type_of<T>(), ncclSum, get(), handle));
    });
  }
  /// Sums `count` elements over ranks; every rank gets the sum. In place: `send == recv`.
  /// @note Collective: yes.
  template <class T>
  Ticket all_reduce(Stream& stream, T const* send, T* recv, std::size_t count, Label label) {
    return enqueue<T>(stream, Collective::all_reduce, send, recv, recv, count, 0, label, [&](auto handle) {
      FSDP_NCCL_CHECK(get(), ncclAllReduce(send, recv, count, detail::type_of<T>(), ncclSum, get(), handle));
    });
  }
  /// Copies `count` elements of rank `root` to every rank, in place.
  /// @note Collective: yes.
  template <class T>
  Ticket broadcast(Stream& stream, T* data, std::size_t count, int root, Label label) {
    return enqueue<T>(stream, Collective::broadcast, data, data, data, count, root, label, [&](auto handle) {
      FSDP_NCCL_CHECK(get(), ncclBroadcast(data, data, count, detail::type_of<T>(), root, get(), handle));
    });
  }

  /// Does nothing: see [Note: NCCL and peers that still read]. `stream` must be ordered after the collective by the
  /// caller.
  /// @throws UsageError if the ticket is of a collective that was not enqueued yet
  void wait_for_peers(Stream& /*stream*/, Ticket ticket, WaitSite /*site*/) {
    FSDP_EXPECTS(ticket.sequence <= state().sequence,
                 "rank {}: wait_for_peers: the ticket is for collective {}, but this communicator has enqueued only {}",
                 rank(), ticket.sequence, state_->sequence);
  }

  /// Every rank's text, in rank order: over TCP if the run was started from the environment, else through device
  /// memory.
  /// @param what the texts are, in a word or two: equal on all ranks
  /// @throws OrderError on every rank if their `what` differ
  /// @note Collective: yes; blocks.
  std::vector<std::string> exchange(std::string text, std::string_view what) {
    if (size() == 1) return {std::move(text)};
    return state_->exchange(text, what);
  }

  /// Gathers texts on rank 0, and sends its answer to all ranks: see comm::ask_first_rank.
  template <class Answer>
  std::string ask_first_rank(std::string const& text, std::string_view what, Answer const& answer) {
    if (size() == 1) return answer(std::vector<std::string>{text});
    return state_->ask_first_rank(text, what, answer);
  }

 private:
  using State = detail::State;
  using Collective = comm::Collective;

  explicit Communicator(std::unique_ptr<State> state) : state_(std::move(state)) {}

  State& state() const {
    FSDP_EXPECTS(state_ != nullptr, "this communicator was moved from; call the object to which it was moved");
    return *state_;
  }

  /// @param own where this rank's input goes in a group of one
  template <class T, class Call>
  Ticket enqueue(Stream& stream, Collective collective, T const* send, T* recv, T* own, std::size_t count, int root,
                 Label label, Call const& call) {
    auto& group = state();
    auto const operation = comm::CallDescription::collective(collective, count, dtype_of<T>, root, label);
    if (collective == Collective::broadcast) comm::expect_root(group.rank, group.size, operation);
    comm::expect_buffers(group.rank, operation, send, recv);
    auto const handle = stream.get();
    if (!group.bound) group.bound = handle;
    comm::expect_bound_stream(group.rank, operation, *group.bound == handle);
    ++group.sequence;
    if (group.options.check_order) check_order(operation);
    if (group.size == 1) {
      group.device.copy_async(stream, own, send, count * sizeof(T));
      return {group.sequence};
    }
    if (count == 0) return {group.sequence};
    cuda::NvtxRange const range(label.unit, label.pass, operation.call);
    group.device.make_current();
    {
      auto const waiting = group.phase(operation.numbered(group.sequence));  // NCCL may have yet to connect the ranks
      group.enqueue(handle, [&] { call(handle); });
    }
    group.watch->enqueued(handle, operation.numbered(group.sequence));
    return {group.sequence};
  }

  /// @throws OrderError on every rank, naming what this rank and the first that differs are about to run
  void check_order(comm::CallDescription operation) {
    operation.label.history = {};
    auto const mine = operation.describe();
    auto const texts = exchange(mine, "order check");
    for (std::size_t peer = 0; peer < texts.size(); ++peer) {
      auto const& first = texts.front() == mine ? texts[peer] : texts.front();
      if (first != mine)
        fail<OrderError>("rank {}: {}", rank(),
                         comm::disagreement_text(state_->sequence, rank(), mine,
                                                 texts.front() == mine ? static_cast<int>(peer) : 0, first));
    }
  }

  std::unique_ptr<State> state_;
};

static_assert(RegistersMemory<Communicator>);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl
