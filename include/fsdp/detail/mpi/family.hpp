// SPDX-License-Identifier: Apache-2.0
// State of a rank for all communicators split from one world: memory, calls, and failures.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/mpi/calls.hpp"
#include "fsdp/detail/mpi/post.hpp"
#include "fsdp/detail/mpi/shared_arena.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

class Family {
 public:
  /// @param id  equal on all ranks    @param post  outlives this
  Family(Post& post, std::uint64_t id, int world_rank) : post_(&post), id_(id), world_rank_(world_rank) {
    post.open(id_);
  }
  Family(Family const&) = delete;
  Family& operator=(Family const&) = delete;
  ~Family() { post_->close(id_); }

  std::uint64_t id() const { return id_; }
  bool spans_nodes() const { return !elsewhere_.empty(); }
  int world_rank() const { return world_rank_; }
  Post& post() { return *post_; }
  SegmentBook& memory() { return memory_; }
  SegmentBook const& memory() const { return memory_; }
  CallBook& calls() { return calls_; }

  /// Shares failures from now on with the ranks of the node, in the world's log, and sends them to the ranks
  /// `elsewhere`.
  void share_failures(CallLog& world, std::vector<int> elsewhere) {
    failure_ = &world.first_failure();
    elsewhere_ = std::move(elsewhere);
  }
  /// Ends every wait in all communicators of the family, on all ranks.
  void fail_all(std::string_view text, bool order_error) {
    if (!failure_->set(text, order_error)) return;
    Letter letter;
    letter.kind = Letter::Kind::failed;
    letter.flag = order_error;
    letter.subject = id_;
    copy_text(letter.text, text);
    post_->send(elsewhere_, letter);
  }
  void throw_if_failed() {
    if (failure_->failed()) raise(*failure_);
  }
  [[noreturn]] void raise(FailureNote const& note) {
    calls_.stop();
    try {
      note.raise(world_rank_);
    } catch (PeerError const&) {
      note_cause(current_failure());
      throw;
    }
  }

  /// Sets the cause of this rank's end that its peers are told. The first call counts.
  void note_cause(Failure const& why) noexcept {
    try {
      cause_.set(peer_failure(world_rank_, why).text, false);
    } catch (std::exception const&) {  // no memory for the text: peers learn that this rank has left
    }
  }
  /// "": none, or none yet
  char const* cause() const { return cause_.failed() ? cause_.text : ""; }

  /// Ends the family if a call of `peer` on this node contradicts `call` of this rank.
  void expect_no_contradiction(CallRecord const& call, int peer) {
    auto const theirs = calls_.against(call, peer);
    if (!theirs) return;
    fail_all(calls_.earliest({call, *theirs}, peer).text(world_rank_, peer), true);
    throw_if_failed();
  }
  /// Reads letters from other nodes: failures, and calls in which ranks wait there, which this rank may contradict.
  void hear() {
    for (auto const& [from, letter] : post_->about(id_)) {
      if (letter.kind == Letter::Kind::failed) failure_->set(letter.text, letter.flag);
      if (letter.kind != Letter::Kind::waits) continue;
      if (auto const mine = calls_.against(letter.record, world_rank_))
        fail_all(Contradiction{*mine, letter.record}.text(world_rank_, from), true);
    }
    throw_if_failed();
  }
  /// Tells ranks on other nodes in which call this rank waits.
  void tell_waiting(std::vector<int> const& world_ranks, CallRecord const& call) {
    Letter letter;
    letter.kind = Letter::Kind::waits;
    letter.subject = id_;
    letter.record = call;
    post_->send(world_ranks, letter);
  }

 private:
  Post* post_;
  std::uint64_t id_;
  int world_rank_;
  SegmentBook memory_;
  CallBook calls_;
  FailureNote alone_;               // of a rank without peers
  FailureNote cause_;               // of this rank's end; not shared
  FailureNote* failure_ = &alone_;  // the node's
  std::vector<int> elsewhere_;      // world ranks on other nodes
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
