// SPDX-License-Identifier: Apache-2.0
// Control plane of one communicator: creation, split, exchange of texts, memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/mpi/calls.hpp"
#include "fsdp/detail/mpi/control.hpp"
#include "fsdp/detail/mpi/header.hpp"
#include "fsdp/detail/mpi/peers.hpp"
#include "fsdp/detail/mpi/shared_arena.hpp"
#include "fsdp/detail/mpi/wait.hpp"
#include "fsdp/detail/mpi/world_state.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// Ranks and shared state of one communicator. Constructed by all ranks together; destroyed by each on its own.
class Group : public Peers {
 public:
  /// @param comm stays open until MPI ends ([Note: Communicators are not freed])
  /// @param nodes for each world rank, the lowest world rank on its node
  /// @param id equal on all ranks, and no other group's
  /// @param lineage of the group that this one was split from
  Group(MPI_Comm comm, std::vector<int> nodes, std::shared_ptr<WorldState> state, std::uint64_t id,
        std::string_view name, std::vector<std::uint64_t> lineage, Options options)
      : Peers(comm, std::move(nodes), std::move(state), id, name, options), lineage_(std::move(lineage)) {
    static std::atomic<std::uint64_t> count{0};
    lineage_.push_back(++count);
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    if (size_ > 1) meet();
  }

  std::uint64_t id() const { return id_; }  ///< equal on all ranks, and no other group's

  /// All-gathers a text. Blocks the calling thread.
  /// @throws OrderError on every rank if their `what` differ
  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    if (size_ == 1) return {text};
    return control_call(text, what, [this](Buffers& buffers, Awaited& awaited) {
      MPI_Request request = MPI_REQUEST_NULL;
      buffers.make_room();
      check(MPI_Iallgatherv(buffers.text.data(), static_cast<int>(buffers.text.size()), MPI_CHAR, buffers.all.data(),
                            buffers.counts.data(), buffers.offsets.data(), MPI_CHAR, comm_, &request),
            "MPI_Iallgatherv");
      complete(request, awaited);
      return buffers.texts();
    });
  }

  /// Gathers texts on rank 0, and sends its answer to all ranks: see comm::ask_first_rank.
  template <class Answer>
  std::string ask_first_rank(std::string const& text, std::string_view what, Answer const& answer) {
    if (size_ == 1) return answer(std::vector<std::string>{text});
    return control_call(text, what, [&](Buffers& buffers, Awaited& awaited) {
      MPI_Request request = MPI_REQUEST_NULL;
      if (rank_ == 0) buffers.make_room();
      check(MPI_Igatherv(buffers.text.data(), static_cast<int>(buffers.text.size()), MPI_CHAR, buffers.all.data(),
                         buffers.counts.data(), buffers.offsets.data(), MPI_CHAR, 0, comm_, &request),
            "MPI_Igatherv");
      complete(request, awaited);
      if (rank_ == 0) buffers.answer = answer(buffers.texts());
      buffers.answer_bytes = static_cast<std::int64_t>(buffers.answer.size());
      check(MPI_Ibcast(&buffers.answer_bytes, sizeof(buffers.answer_bytes), MPI_BYTE, 0, comm_, &request),
            "MPI_Ibcast");
      complete(request, awaited);
      buffers.answer.resize(static_cast<std::size_t>(buffers.answer_bytes));
      check(MPI_Ibcast(buffers.answer.data(), static_cast<int>(buffers.answer_bytes), MPI_CHAR, 0, comm_, &request),
            "MPI_Ibcast");
      complete(request, awaited);
      return std::move(buffers.answer);
    });
  }

  /// Divides the ranks by color, ordered by key, then by rank.
  std::shared_ptr<Group> split(int color, int key, std::string_view name) {
    FSDP_EXPECTS(color >= 0, "rank {}: split: a color must not be negative, got {}", own_world_rank(), color);
    exchange({}, comm::split_of(name));  // a deadline for ranks that never come, which MPI_Comm_split has not
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, color, key, &part), "MPI_Comm_split");
    auto const id = comm::hash_of(formatted("{} {} {}", id_, ++splits_, color));
    return std::make_shared<Group>(part, nodes_, world_state_, id, name, lineage_, options_);
  }

  void* allocate(std::size_t bytes) {
    auto segment =
        size_ == 1 ? (bytes == 0 ? Segment{} : private_segment(bytes)) : shared_segment(on_node_, bytes, "allocate");
    if (segment.own == nullptr) return nullptr;
    segment.owner = lineage_.back();
    void* const memory = segment.own;
    world_state_->memory().add(std::move(segment));
    return memory;
  }
  void deallocate(void* memory) noexcept {
    if (memory != nullptr) world_state_->memory().remove(memory);
  }
  /// Keeps the world's memory mapped from now on, because messages to or from it may still be in flight.
  void keep_memory() noexcept { world_state_->memory().keep(); }
  Place find(void const* data, std::size_t bytes) const {
    if (bytes == 0 || on_node_.size() == 1) return {0, 0, true};
    return world_state_->memory().find(data, bytes, lineage_);
  }
  std::byte* address(Place const& place, int peer) const {
    auto* const memory = world_state_->memory().address(place);
    if (memory == nullptr)
      fail<UsageError>("rank {}: rank {} moves data in memory that this rank has deallocated", own_world_rank(),
                       world_rank_of(peer));
    return memory;
  }

 private:
  struct Announcement {
    std::int64_t length = 0;
    comm::Text what;
    CallRecord call;
  };
  /// Buffers that MPI reads and writes during an exchange.
  struct Buffers {
    Buffers(std::string const& mine, CallRecord const& call, std::string_view what, std::size_t ranks)
        : text(mine), own{static_cast<std::int64_t>(mine.size()), comm::Text(what), call}, calls(ranks) {}
    std::string text;
    Announcement own;
    std::vector<Announcement> calls;
    std::vector<int> counts, offsets;  ///< of texts in `all`
    std::string all;
    std::string answer;
    std::int64_t answer_bytes = 0;

    void make_room() { all.resize(static_cast<std::size_t>(offsets.back() + counts.back())); }
    std::vector<std::string> texts() const {
      std::vector<std::string> parts;
      for (std::size_t rank = 0; rank < counts.size(); ++rank)
        parts.push_back(all.substr(static_cast<std::size_t>(offsets[rank]), static_cast<std::size_t>(counts[rank])));
      return parts;
    }
  };

  /// A call of the control plane: ranks announce what they do, and compare that; then `move(buffers, awaited)` moves
  /// their texts.
  template <class Move>
  std::invoke_result_t<Move const&, Buffers&, Awaited&> control_call(std::string const& text, std::string_view what,
                                                                     Move const& move) {
    if (has_control_) own().calls.publish(++calls_);
    auto const call = world_state_->calls().enter(log_, comm::CallNote::control(id_, name_, what));
    Awaited awaited{CallDescription::exchange(what, name_), call.number, 0, calls_};
    // MPI may still write to what a failed call leaves behind: then it stays.
    auto buffers = std::make_unique<Buffers>(text, call, what, static_cast<std::size_t>(size_));
    try {
      auto& calls = buffers->calls;
      MPI_Request request = MPI_REQUEST_NULL;
      check(MPI_Iallgather(&buffers->own, sizeof(Announcement), MPI_BYTE, calls.data(), sizeof(Announcement), MPI_BYTE,
                           comm_, &request),
            "MPI_Iallgather");
      complete(request, awaited);
      compare(calls);
      std::int64_t total = 0;
      for (auto const& theirs : calls) {
        FSDP_EXPECTS(total + theirs.length <= INT_MAX, "rank {}: exchange of '{}': the texts of all ranks exceed 2 GiB",
                     own_world_rank(), what);
        buffers->counts.push_back(static_cast<int>(theirs.length));
        buffers->offsets.push_back(static_cast<int>(total));
        total += theirs.length;
      }
      return move(*buffers, awaited);
    } catch (...) {
      world_state_->calls().stop();
      static_cast<void>(buffers.release());
      throw;
    }
  }

  /// Finds the ranks, and makes the memory that they share on each node.
  void meet() {
    auto const room = [](CallBook const& book) { return book.has_room() ? "room" : "full"; };
    auto const texts =
        exchange(formatted("{} {} {}", own_world_rank(), options_.ranks_per_node, room(world_state_->calls())),
                 "ranks of a new group");
    world_ranks_.clear();
    bool all_have_room = true;
    for (auto const& text : texts) {
      std::size_t end = 0;
      world_ranks_.push_back(std::stoi(text, &end));
      if (auto const theirs = std::stoi(text.substr(end)); theirs != options_.ranks_per_node)
        fail<ConfigError>("rank {}: ranks_per_node is {} here, but {} on rank {}", own_world_rank(),
                          options_.ranks_per_node, theirs, world_ranks_.back());
      all_have_room = all_have_room && text.ends_with("room");
    }
    for (int r = 0; r < size_; ++r) (node_of(r) == node_of(rank_) ? on_node_ : elsewhere_).push_back(r);
    std::vector<int> nodes;
    for (int r = 0; r < size_; ++r) nodes.push_back(node_of(r));
    placement_ = Placement(nodes, rank_);
    control_ =
        ControlBlock(shared_segment(on_node_, ControlBlock::bytes_for(size_), "control block"), on_node_, rank_, size_);
    auto members = world_ranks_;
    std::sort(members.begin(), members.end());
    CallLog* log = world_state_->calls().find(members);  // of all ranks, or of none
    bool const first = world_state_->calls().is_empty();
    if (log == nullptr && all_have_room) log = make_log(std::move(members));
    if (first && log != nullptr) world_state_->share_failures(*log, world_ranks_elsewhere());
    exchange({}, "control block");  // nobody uses the blocks before all parts of them are constructed
    has_control_ = true;
    log_ = log;
  }
  CallLog* make_log(std::vector<int> members) {
    auto by_world_rank = on_node_;  // blocks lie in the order of world ranks
    std::sort(by_world_rank.begin(), by_world_rank.end(),
              [this](int a, int b) { return world_rank_of(a) < world_rank_of(b); });
    auto segment = shared_segment(by_world_rank, sizeof(CallLog::Block), "calls");
    std::vector<int> on_node;
    for (auto const rank : by_world_rank) on_node.push_back(world_rank_of(rank));
    return world_state_->calls().add(
        std::make_unique<CallLog>(std::move(segment), std::move(members), std::move(on_node), own_world_rank()));
  }
  Segment shared_segment(std::vector<int> const& members, std::size_t bytes, std::string_view what) {
    return make_segment([&](std::string const& text) { return exchange(text, what); }, rank_, members, bytes);
  }

  void compare(std::vector<Announcement> const& calls) {
    auto const at = [&](int rank) -> Announcement const& { return calls[static_cast<std::size_t>(rank)]; };
    if (!has_control_) return;
    comm::expect_same_exchange(
        rank_, size_, [&](int rank) -> auto const& { return at(rank).what; },
        [this](int rank) { return world_rank_of(rank); });
    for (int peer = 0; peer < size_; ++peer) expect_one_order(at(rank_).call, at(peer).call, peer);
  }
  void complete(MPI_Request& request, Awaited& awaited) {
    PollPause pause;
    wait_until(
        own_world_rank(), awaited.operation, options_.timeout,
        [&] {
          int done = 0;
          check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
          if (done == 0) world_state_->throw_if_failed();
          return done != 0;
        },
        [&] {
          look_around(awaited);
          pause();
        },
        [&] { return has_control_ ? behind(&RankControl::calls, calls_) : std::vector<int>{}; });
  }

  std::vector<std::uint64_t> lineage_;  // this communicator, last, and those that it was split from
  std::uint64_t splits_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
