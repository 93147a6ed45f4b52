// SPDX-License-Identifier: Apache-2.0
// Ranks of one communicator: their nodes, progress and failures, for ranks that wait for them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/clock.hpp"
#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/mpi/control.hpp"
#include "fsdp/detail/mpi/environment.hpp"
#include "fsdp/detail/mpi/header.hpp"
#include "fsdp/detail/mpi/placement.hpp"
#include "fsdp/detail/mpi/wait.hpp"
#include "fsdp/detail/mpi/world_state.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// The stage of a collective for which a rank waits.
struct Awaited {
  using Time = AwakeClock::time_point;

  comm::CallDescription operation;  ///< of the waiting rank; its texts live as long as this
  std::uint32_t number = 0;         ///< of its call: CallNumbers::own
  std::uint64_t collectives = 0;    ///< collectives of the communicator that each peer must have enqueued
  std::uint64_t controls = 0;       ///< calls of the control plane that each must have made
  Time first_look{}, next_look{};
  bool told = false;   ///< ranks on other nodes know of it
  bool meets = false;  ///< waits for ranks of all nodes, not only of this one
};

/// Progress of the ranks of one communicator, as this rank and they know it: through shared memory on the node, by
/// notices between nodes. Group makes it complete.
class Peers {
 public:
  Peers(Peers const&) = delete;
  Peers& operator=(Peers const&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int world_rank_of(int rank) const { return world_ranks_[static_cast<std::size_t>(rank)]; }
  int own_world_rank() const { return world_state_->world_rank(); }
  std::vector<int> const& on_node() const { return on_node_; }      ///< this rank too
  std::vector<int> const& elsewhere() const { return elsewhere_; }  ///< ranks on other nodes
  Placement const& placement() const { return placement_; }
  bool is_on_node(int rank) const { return node_of(rank) == node_of(rank_); }
  MPI_Comm comm() const { return comm_; }
  std::string_view name() const { return name_; }
  Options const& options() const { return options_; }
  ControlBlock& control() { return control_; }
  RankControl& own() { return control_[rank_]; }

  /// Writes down a collective for peers that wait elsewhere. Host thread only.
  CallNumbers enter(comm::CallDescription const& operation) {
    return CallNumbers(world_state_->calls().enter(log_, note_of(operation)));
  }

  /// Waits until the counter of each rank on the node has reached `target`.
  void wait_for_node(SharedCounter RankControl::*counter, std::uint64_t target, Awaited& awaited) {
    for (auto const peer : on_node_) {
      if (peer == rank_) continue;
      auto& theirs = control_[peer].*counter;
      wait_until(
          own_world_rank(), awaited.operation, options_.timeout,
          [&] {
            if (theirs.reached(target)) return true;
            throw_if_failed(awaited.collectives);
            return false;
          },
          [&] {
            look_around(awaited);
            theirs.sleep_below(target);
          },
          [&] { return awaited.meets ? absent(awaited, behind(counter, target)) : behind(counter, target); });
    }
  }
  /// World ranks that have not come to a collective, as far as this rank knows: those on other nodes say so when they
  /// have waited there for a while. @param otherwise  where nothing is known
  std::vector<int> absent(Awaited const& awaited, std::vector<int> otherwise) {
    auto ranks = behind(&RankControl::ready, awaited.collectives);
    if (log_ == nullptr || awaited.number == 0) return otherwise;
    auto const notices = world_state_->mail().about(world_state_->id());
    for (auto const rank : world_ranks_elsewhere()) {
      bool const waits = std::any_of(notices.begin(), notices.end(), [&](auto const& received) {
        auto const& [from, notice] = received;
        return from == rank && notice.kind == Notice::Kind::waits && notice.record.set == log_->id() &&
               notice.record.number == awaited.number;
      });
      if (!waits) ranks.push_back(rank);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks.empty() ? otherwise : ranks;
  }
  /// @param collective  in which the caller is
  void throw_if_failed(std::uint64_t collective = FailureNote::any) const {
    world_state_->throw_if_failed();
    if (has_control_ && control_.failure().failed(collective)) world_state_->raise(control_.failure());
  }

  /// Ends every wait of this communicator's ranks in `collective` and after it: this rank has done its part before.
  void fail_all(Failure const& why, std::uint64_t collective) noexcept {
    world_state_->calls().stop();
    world_state_->note_cause(why);
    end_waits(world_state_->cause(), collective);
  }
  /// A stream of this rank has failed, and nobody was told: peers learn it when this rank leaves.
  void note_cause(Failure const& why) noexcept { world_state_->note_cause(why); }
  void fail_order(std::string_view text, std::uint64_t collective) noexcept {
    world_state_->calls().stop();
    if (control_.failure().set(text, true, collective))
      control_.wake_all();  // ranks on other nodes find out by themselves
  }
  /// Ends all communicators of the world if two ranks made different calls before the one in which they meet, `note`.
  void expect_one_order(comm::CallNote const& note, CallNumbers mine, CallNumbers theirs, int peer) {
    if (log_ == nullptr || mine.agree(theirs)) return;
    auto const& calls = world_state_->calls();
    expect_one_order(calls.record_of(*log_, note, mine), calls.record_of(*log_, note, theirs), peer);
  }
  void expect_one_order(CallRecord const& own, CallRecord const& theirs, int peer) {
    if (!CallBook::differ(own, theirs)) return;
    auto const& calls = world_state_->calls();
    auto const found = calls.earliest({own, theirs}, world_rank_of(peer));
    auto text = found.text(own_world_rank(), world_rank_of(peer));
    if (!is_on_node(peer)) text += formatted("; before that, rank {} called {}", own_world_rank(), calls.before(own));
    world_state_->fail_all(text, true);
    world_state_->throw_if_failed();
  }
  comm::CallNote note_of(comm::CallDescription const& collective) const {
    return comm::CallNote::collective(id_, name_, collective);
  }
  /// This rank makes no more calls: peers that wait for more are told. @param collectives  those it has enqueued
  void leave(std::uint64_t collectives, bool by_exception) noexcept {
    if (by_exception) world_state_->calls().stop();
    if (!has_control_) return;
    if (auto const* const cause = world_state_->cause(); *cause != '\0') end_waits(cause, collectives + 1);
    own().left.store(RankControl::departure(collectives, by_exception), std::memory_order_release);
    control_.wake_all();
    Notice notice;
    notice.kind = Notice::Kind::left;
    notice.flag = by_exception;
    notice.subject = id_;
    notice.collectives = collectives;
    notice.calls = calls_;
    world_state_->mail().send(world_ranks_elsewhere(), notice);
  }

  /// Looks for peers that will never come. A waiting thread calls it now and then.
  /// @throws OrderError, PeerError
  void look_around(Awaited& awaited) {
    auto const now = AwakeClock::now();
    if (now < awaited.next_look || !has_control_) return;
    if (awaited.first_look == Awaited::Time{}) awaited.first_look = now;
    awaited.next_look = now + std::chrono::milliseconds(10);
    auto const call = log_ == nullptr ? std::nullopt : log_->own().read(awaited.number);
    for (auto const peer : on_node_) {
      if (peer == rank_) continue;
      auto const left = control_[peer].left.load(std::memory_order_acquire);
      if (left != 0)
        expect_enough(awaited, world_rank_of(peer), (left >> 1) - 1, control_[peer].calls.value.load(),
                      (left & 1) != 0);
      if (call) world_state_->expect_no_contradiction(*call, world_rank_of(peer));
    }
    if (!world_state_->spans_nodes()) return;
    world_state_->mail().collect();
    world_state_->hear();
    for (auto const& [from, notice] : world_state_->mail().about(id_)) {
      if (notice.kind == Notice::Kind::failed && control_.failure().set(notice.text, notice.flag, notice.collectives))
        control_.wake_all();
      if (notice.kind == Notice::Kind::left)
        expect_enough(awaited, from, notice.collectives, notice.calls, notice.flag);
    }
    if (awaited.told || !call || now - awaited.first_look < std::chrono::milliseconds(100)) return;
    awaited.told = true;
    world_state_->tell_waiting(world_ranks_elsewhere(), *call);
  }

 protected:
  void end_waits(char const* text, std::uint64_t collective) noexcept {
    if (!has_control_ || !control_.failure().set(text, false, collective)) return;
    control_.wake_all();
    Notice notice;
    notice.kind = Notice::Kind::failed;
    notice.subject = id_;
    notice.collectives = collective;
    copy_text(notice.text, text);
    world_state_->mail().send(world_ranks_elsewhere(), notice);
  }
  Peers(MPI_Comm comm, std::vector<int> nodes, std::shared_ptr<WorldState> state, std::uint64_t id,
        std::string_view name, Options options)
      : comm_(comm), options_(options), nodes_(std::move(nodes)), world_state_(std::move(state)), id_(id), name_(name) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    world_ranks_.push_back(world_state_->world_rank());
    if (size_ == 1) {
      on_node_.push_back(0);
      placement_ = Placement({0}, 0);
    }
    world_state_->mail().open(id_);
  }
  ~Peers() { world_state_->mail().close(id_); }

  int node_of(int rank) const { return nodes_[static_cast<std::size_t>(world_rank_of(rank))]; }
  std::vector<int> world_ranks_elsewhere() const {
    std::vector<int> ranks;
    for (auto const rank : elsewhere_) ranks.push_back(world_rank_of(rank));
    return ranks;
  }
  std::vector<int> behind(SharedCounter RankControl::*counter, std::uint64_t target) {
    std::vector<int> ranks;
    for (auto const peer : on_node_)
      if (peer != rank_ && !(control_[peer].*counter).reached(target)) ranks.push_back(world_rank_of(peer));
    return ranks;
  }

  /// @throws PeerError unless a rank that has left has made the calls that this rank waits for
  void expect_enough(Awaited const& awaited, int left, std::uint64_t collectives, std::uint64_t controls,
                     bool by_exception) const {
    if (collectives >= awaited.collectives && controls >= awaited.controls) return;
    throw_if_failed();  // who left because of a failure had noted it before
    world_state_->calls().stop();
    comm::throw_peer_left(own_world_rank(), awaited.operation, left, by_exception);
  }
  MPI_Comm comm_;
  Options options_;
  std::vector<int> nodes_;  // for each world rank, the lowest world rank on its node
  std::shared_ptr<WorldState> world_state_;
  std::uint64_t id_;
  std::string name_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<int> world_ranks_, on_node_, elsewhere_;
  Placement placement_;
  ControlBlock control_;
  bool has_control_ = false;
  CallLog* log_ = nullptr;   // of the calls of these ranks; nullptr: they are not followed
  std::uint64_t calls_ = 0;  // of the control plane
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
