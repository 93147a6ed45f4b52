// SPDX-License-Identifier: Apache-2.0
// The ranks of one communicator: who is on this node, how they meet, and the calls of the control plane.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/comm/mpi_control.hpp"
#include "fsdp/comm/mpi_environment.hpp"
#include "fsdp/comm/mpi_header.hpp"
#include "fsdp/comm/mpi_wait.hpp"
#include "fsdp/comm/shared_arena.hpp"

namespace fsdp::mpi::detail {

/// One communicator's ranks and shared state. Constructed by all ranks together; destroyed by each on its own.
class Group {
 public:
  /// @param comm stays open until MPI ends ([Note: Communicators are not freed])
  /// @param nodes for each world rank, the lowest world rank on its node
  Group(MPI_Comm comm, std::vector<int> nodes, std::shared_ptr<SegmentBook> book, std::vector<std::uint64_t> lineage,
        Options options)
      : comm_(comm), options_(options), nodes_(std::move(nodes)), book_(std::move(book)), lineage_(std::move(lineage)) {
    static std::atomic<std::uint64_t> count{0};
    lineage_.push_back(++count);
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    world_ranks_.push_back(world_rank());
    if (size_ == 1) {
      on_node_.push_back(0);
      return;
    }
    auto const ranks = exchange(std::to_string(world_ranks_.front()), "ranks of a new group");
    world_ranks_.clear();
    for (auto const& text : ranks) world_ranks_.push_back(std::stoi(text));
    for (int r = 0; r < size_; ++r) (node_of(r) == node_of(rank_) ? on_node_ : elsewhere_).push_back(r);
    auto segment = make_segment([this](std::string const& text) { return exchange(text, "control block"); }, rank_,
                                on_node_, ControlBlock::bytes_for(size_));
    control_ = ControlBlock(std::move(segment), on_node_, rank_, size_);
    exchange({}, "control block");  // nobody uses the block before all parts of it are constructed
    has_control_ = true;
  }
  Group(Group const&) = delete;
  Group& operator=(Group const&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int world_rank_of(int rank) const { return world_ranks_[static_cast<std::size_t>(rank)]; }
  int own_world_rank() const { return world_rank_of(rank_); }
  std::vector<int> const& on_node() const { return on_node_; }      ///< this rank too
  std::vector<int> const& elsewhere() const { return elsewhere_; }  ///< ranks on other nodes
  bool is_on_node(int rank) const { return node_of(rank) == node_of(rank_); }
  MPI_Comm comm() const { return comm_; }
  Options const& options() const { return options_; }
  ControlBlock& control() { return control_; }
  RankControl& own() { return control_[rank_]; }

  /// All-gathers a text. Blocks the calling thread.
  /// @throws OrderError on every rank if their `what` differ
  std::vector<std::string> exchange(std::string const& text, std::string_view what) {
    if (size_ == 1) return {text};
    if (has_control_) own().calls.publish(++calls_);
    auto const ranks = static_cast<std::size_t>(size_);
    struct Announcement {
      std::int64_t length = 0;
      comm::Text what;
    };
    Announcement const own_call{static_cast<std::int64_t>(text.size()), comm::Text(what)};
    std::vector<Announcement> calls(ranks);
    MPI_Request request = MPI_REQUEST_NULL;
    check(
        MPI_Iallgather(&own_call, sizeof own_call, MPI_BYTE, calls.data(), sizeof own_call, MPI_BYTE, comm_, &request),
        "MPI_Iallgather");
    complete(request, what);
    comm::expect_same_exchange(
        rank_, size_, [&](int rank) -> auto const& { return calls[static_cast<std::size_t>(rank)].what; },
        [this](int rank) { return world_rank_of(rank); });
    std::vector<int> counts(ranks);
    std::vector<int> offsets(ranks);
    std::int64_t total = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      FSDP_EXPECTS(total + calls[r].length <= INT_MAX, "rank {}: exchange: the texts of all ranks exceed 2 GiB",
                   world_rank());
      counts[r] = static_cast<int>(calls[r].length);
      offsets[r] = static_cast<int>(total);
      total += calls[r].length;
    }
    std::string all(static_cast<std::size_t>(total), '\0');
    check(MPI_Iallgatherv(text.data(), static_cast<int>(text.size()), MPI_CHAR, all.data(), counts.data(),
                          offsets.data(), MPI_CHAR, comm_, &request),
          "MPI_Iallgatherv");
    complete(request, what);
    std::vector<std::string> texts;
    for (std::size_t r = 0; r < ranks; ++r)
      texts.push_back(all.substr(static_cast<std::size_t>(offsets[r]), static_cast<std::size_t>(counts[r])));
    return texts;
  }

  /// Divides the ranks by color, ordered by key, then by rank.
  std::shared_ptr<Group> split(int color, int key, std::string_view name) {
    FSDP_EXPECTS(color >= 0, "rank {}: split: a color must not be negative, got {}", own_world_rank(), color);
    exchange({}, comm::split_of(name));  // a deadline for ranks that never come, which MPI_Comm_split has not
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, color, key, &part), "MPI_Comm_split");
    return std::make_shared<Group>(part, nodes_, book_, lineage_, options_);
  }

  void* allocate(std::size_t bytes) {
    auto segment = size_ == 1 ? (bytes == 0 ? Segment{} : private_segment(bytes))
                              : make_segment([this](std::string const& text) { return exchange(text, "allocate"); },
                                             rank_, on_node_, bytes);
    if (segment.own == nullptr) return nullptr;
    segment.owner = lineage_.back();
    void* const memory = segment.own;
    book_->add(std::move(segment));
    return memory;
  }
  void deallocate(void* memory) noexcept {
    if (memory != nullptr) book_->remove(memory);
  }
  Place find(void const* data, std::size_t bytes) const {
    if (bytes == 0 || on_node_.size() == 1) return {0, 0, true};
    return book_->find(data, bytes, lineage_);
  }
  std::byte* address(Place const& place, int peer) const {
    auto* const memory = book_->address(place);
    if (memory == nullptr)
      fail<UsageError>("rank {}: rank {} moves data in memory that this rank has deallocated", own_world_rank(),
                       world_rank_of(peer));
    return memory;
  }

  /// Waits until the counter of each rank on the node has reached `target`.
  void wait_for_node(SharedCounter RankControl::*counter, std::uint64_t target, Scene const& scene) {
    for (auto const peer : on_node_) {
      if (peer == rank_) continue;
      auto& awaited = control_[peer].*counter;
      wait_until(
          scene, options_.timeout,
          [&] {
            if (awaited.reached(target)) return true;
            throw_if_failed();
            return false;
          },
          [&] { awaited.sleep_below(target); }, [&] { return behind(counter, target); });
    }
  }
  void throw_if_failed() {
    if (control_.failed()) control_.throw_failure(own_world_rank());
  }

 private:
  int node_of(int rank) const { return nodes_[static_cast<std::size_t>(world_rank_of(rank))]; }

  std::vector<int> behind(SharedCounter RankControl::*counter, std::uint64_t target) {
    std::vector<int> ranks;
    for (auto const peer : on_node_)
      if (peer != rank_ && !(control_[peer].*counter).reached(target)) ranks.push_back(world_rank_of(peer));
    return ranks;
  }
  void complete(MPI_Request& request, std::string_view what) {
    Scene const scene{world_rank(), "a control call", what, {}};
    wait_until(
        scene, options_.timeout,
        [&] {
          int done = 0;
          check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
          return done != 0;
        },
        PollPause{}, [&] { return has_control_ ? behind(&RankControl::calls, calls_) : std::vector<int>{}; });
  }

  MPI_Comm comm_;
  Options options_;
  std::vector<int> nodes_;
  std::shared_ptr<SegmentBook> book_;
  std::vector<std::uint64_t> lineage_;  // this communicator, last, and those that it was split from
  int rank_ = 0;
  int size_ = 1;
  std::vector<int> world_ranks_, on_node_, elsewhere_;
  ControlBlock control_;
  bool has_control_ = false;
  std::uint64_t calls_ = 0;
};

}  // namespace fsdp::mpi::detail
