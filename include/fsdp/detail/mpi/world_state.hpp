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
#include "fsdp/detail/mpi/node_mail.hpp"
#include "fsdp/detail/mpi/shared_arena.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

class WorldState {
 public:
  /// @param id  equal on all ranks    @param mail  outlives this
  WorldState(NodeMail& mail, std::uint64_t id, int world_rank) : mail_(&mail), id_(id), world_rank_(world_rank) {
    mail.open(id_);
  }
  WorldState(WorldState const&) = delete;
  WorldState& operator=(WorldState const&) = delete;
  ~WorldState() { mail_->close(id_); }

  std::uint64_t id() const { return id_; }
  bool spans_nodes() const { return !elsewhere_.empty(); }
  int world_rank() const { return world_rank_; }
  NodeMail& mail() { return *mail_; }
  SegmentBook& memory() { return memory_; }
  SegmentBook const& memory() const { return memory_; }
  CallBook& calls() { return calls_; }

  /// Shares failures from now on with the ranks of the node, in the world's log, and sends them to the ranks
  /// `elsewhere`.
  void share_failures(CallLog& world, std::vector<int> elsewhere) {
    failure_ = &world.first_failure();
    elsewhere_ = std::move(elsewhere);
  }
  /// Ends every wait in all communicators of the world, on all ranks.
  void fail_all(std::string_view text, bool order_error) {
    if (!failure_->set(text, order_error)) return;
    Notice notice;
    notice.kind = Notice::Kind::failed;
    notice.flag = order_error;
    notice.subject = id_;
    copy_text(notice.text, text);
    mail_->send(elsewhere_, notice);
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

  /// Ends all communicators of the world if a call of `peer` on this node contradicts `call` of this rank.
  void expect_no_contradiction(CallRecord const& call, int peer) {
    auto const theirs = calls_.against(call, peer);
    if (!theirs) return;
    fail_all(calls_.earliest({call, *theirs}, peer).text(world_rank_, peer), true);
    throw_if_failed();
  }
  /// Reads notices from other nodes: failures, and calls in which ranks wait there, which this rank may contradict.
  void hear() {
    for (auto const& [from, notice] : mail_->about(id_)) {
      if (notice.kind == Notice::Kind::failed) failure_->set(notice.text, notice.flag);
      if (notice.kind != Notice::Kind::waits) continue;
      if (auto const mine = calls_.against(notice.record, world_rank_))
        fail_all(Contradiction{*mine, notice.record}.text(world_rank_, from), true);
    }
    throw_if_failed();
  }
  /// Tells ranks on other nodes in which call this rank waits.
  void tell_waiting(std::vector<int> const& world_ranks, CallRecord const& call) {
    Notice notice;
    notice.kind = Notice::Kind::waits;
    notice.subject = id_;
    notice.record = call;
    mail_->send(world_ranks, notice);
  }

 private:
  NodeMail* mail_;
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
