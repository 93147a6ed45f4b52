// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes of MPI: shared memory inside a node, MPI across nodes and for start-up.
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/compiled.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/mpi/calls.hpp"
#include "fsdp/detail/mpi/collectives.hpp"
#include "fsdp/detail/mpi/environment.hpp"
#include "fsdp/detail/mpi/group.hpp"
#include "fsdp/detail/mpi/world_state.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi {

/// Model of fsdp::Communicator over processes. Memory from `allocate` is moved without copies between ranks of a node;
/// any other memory works too, through a scratch area.
///
/// Reductions are sums in the fixed pairwise tree over ranks, wherever the ranks are: results are bitwise equal for any
/// placement on nodes. Half precision is summed in fp32 and rounded once.
/// @tparam D a device whose streams are host::Stream
template <class D = host::Device>
class BasicCommunicator {
 public:
  using Device = D;                   ///< the device whose memory is moved
  using Stream = typename D::Stream;  ///< host streams, on which collectives run
  static_assert(std::same_as<Stream, host::Stream>, "fsdp::mpi moves host memory on host streams");

  /// All ranks of the run.
  /// @note Collective: yes, over all ranks.
  explicit BasicCommunicator(Environment const& environment, D device = {}, Options options = {})
      : BasicCommunicator(make_world(environment, options), std::move(device)) {}

  BasicCommunicator(BasicCommunicator&&) noexcept = default;  ///< the source can then only be destroyed or assigned to
  /// Releases this communicator as its destructor does, and takes over `other`.
  BasicCommunicator& operator=(BasicCommunicator&& other) noexcept {
    if (this == &other) return *this;
    leave();
    state_ = std::move(other.state_);
    device_ = std::move(other.device_);
    return *this;
  }
  /// Releases this rank's share, once its enqueued collectives have run. Waits for nobody; peers that wait for more of
  /// this rank than it has enqueued get a PeerError. A communicator that was moved from can be destroyed, assigned to,
  /// and nothing else: calls throw a UsageError.
  ~BasicCommunicator() { leave(); }

  int rank() const { return state().group->rank(); }  ///< this process's rank, from 0
  int size() const { return state().group->size(); }  ///< number of ranks
  D const& device() const { return device_; }         ///< this rank's device
  /// Ranks with which this one shares memory, ascending; this one too.
  std::vector<int> const& ranks_on_node() const { return state().group->on_node(); }

  /// Ranks of equal color form a new communicator, ordered by key, then by rank.
  /// @param what the name of the new communicators, for messages: equal on all ranks
  /// @pre color >= 0
  /// @throws OrderError on every rank if some do something else
  /// @note Collective: yes, over this communicator; ends with shared memory for the new one: 260 KiB per rank, 200 KiB
  /// more for the first communicator of a set of ranks.
  BasicCommunicator split(int color, int key, std::string_view what) {
    return {state().group->split(color, key, what), device_};
  }

  /// Zeroed memory that this communicator's collectives, and those of every communicator split from it, move without
  /// copies: shared by the ranks of the node, aligned to the page.
  /// @param bytes of this rank; all ranks of a node get room for the largest
  /// @returns nullptr for 0 bytes on every rank of the node
  /// @throws ResourceError on every rank if it cannot be had on any node
  /// @note Collective: yes; blocks the calling thread.
  void* allocate(std::size_t bytes) { return state().group->allocate(bytes); }
  /// Unmaps this rank's view of what one call of `allocate` gave to all ranks.
  /// @pre collectives that use the memory, of this rank and of peers on its node, have completed on this rank
  /// @note Collective: no.
  void deallocate(void* memory, std::size_t) noexcept {
    if (state_ != nullptr) state_->group->deallocate(memory);
  }

  /// Gathers every rank's `count` elements, in rank order, into `receive` (size() * count elements).
  /// @pre in place only with send == receive + rank() * count
  /// @note Stream: peers may read `send` after this rank's completion, until wait_for_peers.
  /// @note Collective: yes; each rank reads (size() - 1) * count elements of its peers.
  template <class T>
  Ticket all_gather(Stream& stream, T const* send, T* receive, std::size_t count, Label label) {
    auto const ranks = static_cast<std::size_t>(size());
    return enqueue(stream, comm::Collective::all_gather, send, receive, {count, count, count * ranks}, 0, label);
  }

  /// Sums rank slices: this rank gets the sum over ranks of slice rank() of their `send` (size() * count elements).
  /// @pre in place only with receive == send + rank() * count
  /// @note Stream: peers may read `send` after this rank's completion, until wait_for_peers.
  /// @note Collective: yes; each rank reads count elements of every peer.
  template <class T>
  Ticket reduce_scatter(Stream& stream, T const* send, T* receive, std::size_t count, Label label) {
    auto const ranks = static_cast<std::size_t>(size());
    return enqueue(stream, comm::Collective::reduce_scatter, send, receive, {count, count * ranks, 0}, 0, label);
  }

  /// Sums `count` elements over all ranks; every rank gets the sum.
  /// @pre in place only with send == receive
  /// @note Stream: in place, peers may read the memory after this rank's completion, until wait_for_peers.
  /// @note Collective: yes; a reduce-scatter and an all-gather of the parts, or one step up to 16 KiB.
  template <class T>
  Ticket all_reduce(Stream& stream, T const* send, T* receive, std::size_t count, Label label) {
    return enqueue(stream, comm::Collective::all_reduce, send, receive, {count, count, count}, 0, label);
  }

  /// The mean over all ranks: of each element, the sum that all_reduce gives, times 1.0f / size(). In the same passes
  /// over memory.
  Ticket all_reduce_mean(Stream& stream, float const* send, float* receive, std::size_t count, Label label) {
    return enqueue(stream, comm::Collective::all_reduce_mean, send, receive, {count, count, count}, 0, label);
  }

  /// Copies `count` elements of rank `root` to all ranks, in place.
  /// @note Stream: peers may read the root's memory after its completion, until wait_for_peers.
  /// @note Collective: yes.
  template <class T>
  Ticket broadcast(Stream& stream, T* data, std::size_t count, int root, Label label) {
    return enqueue(stream, comm::Collective::broadcast, static_cast<T const*>(data), data, {count, count, 0}, root,
                   label);
  }

  /// Later work of `stream` (any stream) waits until all peers have completed the collective: they no longer read what
  /// this rank put in.
  /// @throws UsageError for a ticket that was not given out yet
  void wait_for_peers(Stream& stream, Ticket ticket, WaitSite site) {
    FSDP_EXPECTS(ticket.sequence <= state().sequence,
                 "rank {}: wait_for_peers: the ticket is for collective {}, but this communicator has enqueued only {} "
                 "(site '{}')",
                 world_rank(), ticket.sequence, state_->sequence, fsdp::name(site));
    if (size() == 1 || ticket.sequence == 0) return;
    stream.enqueue(PeerWait{state_, ticket, site});
  }

  /// A stream of this rank has failed. Peers that wait for this rank are told why, when this communicator ends or one
  /// that was split from the same world.
  void note_failure(Failure const& why) noexcept { state().group->note_cause(why); }
  /// A stream of this rank has failed, and no call has thrown that: mpi::run or Environment reports it and ends with an
  /// error.
  void defer_failure(Failure const& why) noexcept { detail::deferred_failure().set(why.text, false); }

  /// All-gathers a text. Blocks the calling thread.
  /// @param what the texts are, in a word or two: equal on all ranks
  /// @throws OrderError on every rank if their `what` differ
  /// @note Collective: yes.
  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    return state().group->exchange(text, what);
  }
  /// Gathers texts on rank 0, and sends its answer to all ranks: see comm::ask_first_rank.
  template <class Answer>
  std::string ask_first_rank(std::string const& text, std::string_view what, Answer const& answer) {
    return state().group->ask_first_rank(text, what, answer);
  }

  /// Records the end of an engine of this rank: Environment::expect_equal_ends compares its last steps over ranks. See
  /// ReportsHistory.
  void report_history(int engine, std::string_view history) noexcept {
    if (state_ == nullptr) return;
    std::scoped_lock const lock(detail::ends().mutex);
    detail::ends().ends.add(state_->group->id(), engine, history);
  }

 private:
  /// State of the communicator. Tasks of its stream share it, so that it lives as long as they do.
  struct State {
    explicit State(std::shared_ptr<detail::Group> members) : group(std::move(members)), collectives(*group) {}
    std::shared_ptr<detail::Group> group;
    detail::Collectives collectives;
    void const* stream = nullptr;
    std::uint64_t sequence = 0;
    int exceptions = std::uncaught_exceptions();  // on their way when this began
  };
  /// A collective as a task of its stream. If that has failed, peers are told so in its place.
  struct Task {
    static constexpr bool moves_as_bytes = true;  // as a shared_ptr does

    Task(std::shared_ptr<State> state, detail::Call const& what) : owner(std::move(state)), call(what) {}
    void operator()() { owner->collectives.run(call); }
    void skip(Failure const& why) noexcept { owner->collectives.drop(call, why); }
    std::shared_ptr<State> owner;
    detail::Call call;
  };
  struct PeerWait {
    static constexpr bool moves_as_bytes = true;

    void operator()() const { state->collectives.wait_for_peers(ticket, site); }
    std::shared_ptr<State> state;
    Ticket ticket;
    WaitSite site;
  };
  struct Extent {
    std::size_t count;     // what the order check compares
    std::size_t sent;      // elements that peers may read from `send`
    std::size_t received;  // elements that peers may write into `receive`
  };

  BasicCommunicator(std::shared_ptr<detail::Group> group, D device);

  static std::shared_ptr<detail::Group> make_world(Environment const& environment, Options options);
  State& state() const {
    FSDP_EXPECTS(state_ != nullptr, "this communicator was moved from; call the object to which it was moved");
    return *state_;
  }
  void leave() noexcept;
  int world_rank() const { return state().group->own_world_rank(); }

  template <class T>
  Ticket enqueue(Stream& stream, comm::Collective collective, T const* send, T* receive, Extent extent, int root,
                 Label label) {
    auto& own = state();
    auto const operation = comm::CallDescription::collective(collective, extent.count, dtype_of<T>, root, label);
    if (collective == comm::Collective::broadcast) comm::expect_root(world_rank(), size(), operation);
    comm::expect_buffers(world_rank(), operation, send, receive);
    if (own.stream == nullptr) own.stream = stream.id();
    comm::expect_bound_stream(world_rank(), operation, own.stream == stream.id(), stream.name());
    detail::Call call;
    call.send = reinterpret_cast<std::byte const*>(send);
    call.receive = reinterpret_cast<std::byte*>(receive);
    auto& header = call.header;
    header.sequence = own.sequence + 1;
    header.count = extent.count;
    header.unit_hash = detail::hash_of(label.unit);
    header.history_hash = detail::hash_of(label.history);
    header.root = root;
    header.collective = collective;
    header.type = dtype_of<T>;
    if (size() > 1) {
      header.send = own.group->find(send, extent.sent * sizeof(T));
      header.receive = own.group->find(receive, extent.received * sizeof(T));
      header.numbers = own.group->enter(operation);
      detail::copy_text(header.unit, label.unit);
      detail::copy_text(header.pass, label.pass);
      detail::copy_text(header.history, label.history);
    }
    try {
      stream.enqueue(Task(state_, call));
    } catch (...) {  // the stream has failed
      own.collectives.drop(call, current_failure());
      throw;
    }
    return {++own.sequence};
  }

  std::shared_ptr<State> state_;
  D device_;
};

template <class D>
BasicCommunicator<D>::BasicCommunicator(std::shared_ptr<detail::Group> group, D device)
    : state_(std::make_shared<State>(std::move(group))), device_(std::move(device)) {}

template <class D>
std::shared_ptr<detail::Group> BasicCommunicator<D>::make_world(Environment const& environment, Options options) {
  MPI_Comm world = MPI_COMM_NULL;
  detail::check(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  // A stream may wait for work that waits for peers: the peers' message must come first.
  if (host::wait_deadline() < 2 * options.timeout) host::set_wait_deadline(2 * options.timeout);
  static std::atomic<std::uint64_t> worlds{0};  // all ranks make the same ones
  auto const id = ++worlds;
  auto state = std::make_shared<detail::WorldState>(environment.mail(), id, environment.rank());
  return std::make_shared<detail::Group>(world, environment.nodes(options.ranks_per_node), std::move(state),
                                         detail::hash_of(formatted("world {}", id)), "world",
                                         std::vector<std::uint64_t>{}, options);
}

template <class D>
void BasicCommunicator<D>::leave() noexcept {
  if (state_ != nullptr) state_->group->leave(state_->sequence, std::uncaught_exceptions() > state_->exceptions);
}

/// The communicator of plain host devices.
using Communicator = BasicCommunicator<>;

static_assert(fsdp::Communicator<Communicator>);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi

#if FSDP_COMPILED_MPI
#include "fsdp/detail/compiled/instances.hpp"

#define FSDP_MPI_INSTANCES(how)                                          \
  FSDP_COMMUNICATOR_INSTANCES(how, mpi::BasicCommunicator<host::Device>) \
  FSDP_ENGINE_INSTANCES(how, mpi::BasicCommunicator<host::Device>, Fp32)

namespace fsdp::inline FSDP_VERSION_NAMESPACE {
FSDP_DEVICE_INSTANCES(extern template, host::Device, Fp32)
FSDP_MPI_INSTANCES(extern template)
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#endif
