// SPDX-License-Identifier: Apache-2.0
// Which accesses to memory does nothing order? Of the recordings of all ranks of a run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/format.hpp"
#include "tests/support/recording.hpp"

namespace fsdp::testing {

/// Orders what the ranks of one run have enqueued, by vector clocks (Mattern 1989; one component for each stream and
/// each host thread), and looks for two accesses to one byte of which one writes and neither is ordered before the
/// other.
///
/// Order comes from streams, events, host waits, and communicators: a collective begins when all members have begun it
/// (for a broadcast, when its root has), and wait_for_peers() returns when all members have completed it. So what a
/// rank may know of its peers follows, and is not assumed.
class Hazards {
 public:
  using Recordings = std::vector<std::shared_ptr<Recording const>>;  ///< by rank
  /// One entry of one rank.
  struct At {
    std::size_t rank, entry;
    bool operator==(At const&) const = default;
  };

  explicit Hazards(Recordings recordings) : ranks_(std::move(recordings)) {
    for (auto const& recording : ranks_) {
      first_actor_.push_back(actors_);
      actors_ += 1 + recording->streams.size();
    }
    cut_memory();
    places_.resize(ranks_.size());
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
      for (auto const& entry : ranks_[rank]->entries) places_[rank].push_back(place(entry));
  }

  /// @param dropped  a wait that is left out
  /// @param most     stops when so many were found
  /// @return one text for each
  std::vector<std::string> find(std::optional<At> dropped = {}, std::size_t most = 20) const {
    Run run(*this, dropped, most);
    return run.find();
  }
  /// Waits of streams, for events and for peers.
  std::vector<At> waits(std::size_t rank) const {
    std::vector<At> found;
    auto const& entries = ranks_[rank]->entries;
    for (std::size_t i = 0; i < entries.size(); ++i)
      if (entries[i].kind == Enqueued::Kind::wait || entries[i].kind == Enqueued::Kind::wait_for_peers)
        found.push_back({rank, i});
    return found;
  }
  Enqueued const& at(At entry) const { return ranks_[entry.rank]->entries[entry.entry]; }

 private:
  using Clock = std::vector<std::uint32_t>;
  static void join(Clock& into, Clock const& other) {
    for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
  }

  /// Consecutive bytes that every access of the run takes whole or not at all.
  struct Cells {
    std::size_t first, last;
    bool writes;
  };
  /// What of an entry is the same in every run.
  struct Place {
    std::vector<Cells> accesses, input;
    std::size_t meeting = 0;  ///< index of the collective or exchange, equal on its members; 0: none
  };

  void cut_memory() {
    for (auto const& recording : ranks_)
      for (auto const& entry : recording->entries)
        for (auto const* list : {&entry.accesses, &entry.input})
          for (auto const& access : *list) cuts_.push_back(access.begin), cuts_.push_back(access.end);
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
  }
  std::vector<Cells> cells_of(std::vector<Access> const& accesses) const {
    std::vector<Cells> cells;
    auto const index = [&](std::uintptr_t address) {
      return static_cast<std::size_t>(std::lower_bound(cuts_.begin(), cuts_.end(), address) - cuts_.begin());
    };
    for (auto const& access : accesses) cells.push_back({index(access.begin), index(access.end), access.writes});
    return cells;
  }
  Place place(Enqueued const& entry) {
    Place place{cells_of(entry.accesses), cells_of(entry.input), 0};
    bool const meets = entry.kind == Enqueued::Kind::collective || entry.kind == Enqueued::Kind::wait_for_peers;
    if (meets || entry.kind == Enqueued::Kind::exchange)
      place.meeting =
          meetings_.try_emplace({meets, entry.communicator, entry.sequence}, meetings_.size() + 1).first->second;
    return place;
  }

  class Run {
   public:
    Run(Hazards const& all, std::optional<At> dropped, std::size_t most)
        : all_(all),
          dropped_(dropped),
          most_(most),
          next_(all.ranks_.size(), 0),
          came_(all.ranks_.size(), 0),
          clocks_(all.actors_, Clock(all.actors_, 0)),
          meetings_(all.meetings_.size() + 1),
          memory_(all.cuts_.size()) {
      for (auto const& recording : all.ranks_)
        events_.emplace_back(static_cast<std::size_t>(recording->events), Clock(all.actors_, 0));
    }

    std::vector<std::string> find() {
      for (bool moved = true; moved && found_.size() < most_;) {
        moved = false;
        for (std::size_t rank = 0; rank < next_.size(); ++rank)
          while (found_.size() < most_ && next_[rank] < all_.ranks_[rank]->entries.size() && step(rank)) moved = true;
      }
      for (std::size_t rank = 0; rank < next_.size() && found_.size() < most_; ++rank)
        if (next_[rank] < all_.ranks_[rank]->entries.size())
          throw std::logic_error(
              formatted("rank {} waits for ever at '{}'", rank, all_.ranks_[rank]->entries[next_[rank]].what));
      return found_;
    }

   private:
    /// All members of one collective or exchange.
    struct Meeting {
      std::vector<Clock> begun, ended;                ///< by arrival
      std::vector<std::vector<Cells> const*> inputs;  ///< by arrival
      std::vector<int> members;                       ///< by arrival
    };
    /// An access that was the last one of its kind.
    struct Stamp {
      std::size_t actor = 0;
      std::uint32_t number = 0;  ///< 0: none
      std::size_t meeting = 0;
      At at{};
    };
    struct Cell {
      Stamp write;
      std::vector<Stamp> reads;  ///< since, one for each actor
    };

    /// Takes a rank's next entry. @return false if it has to wait for other ranks first
    bool step(std::size_t rank) {
      auto const at = At{rank, next_[rank]};
      auto const& entry = all_.at(at);
      auto const& place = all_.places_[rank][at.entry];
      auto& host = clocks_[all_.first_actor_[rank]];
      auto const actor = all_.first_actor_[rank] + 1 + static_cast<std::size_t>(std::max(entry.stream, 0));
      auto* const stream = entry.stream >= 0 ? &clocks_[actor] : nullptr;
      if (stream != nullptr) join(*stream, host);
      auto& events = events_[rank];
      auto const event = static_cast<std::size_t>(std::max(entry.event, 0));
      auto& meeting = meetings_[place.meeting];
      auto const all = static_cast<std::size_t>(entry.members);
      switch (entry.kind) {
        case Enqueued::Kind::operation:
          ++(*stream)[actor];
          access(at, actor, place.accesses, 0, true);
          break;
        case Enqueued::Kind::collective:
          if (!arrive(rank, meeting, *stream, entry, &place.input)) return false;
          for (std::size_t i = 0; i < all; ++i)
            if (entry.root < 0 || meeting.members[i] == entry.root) join(*stream, meeting.begun[i]);
          ++(*stream)[actor];
          access(at, actor, place.accesses, place.meeting, true);
          for (std::size_t i = 0; i < all; ++i)
            if (meeting.members[i] != entry.member) access(at, actor, *meeting.inputs[i], place.meeting, false);
          meeting.ended.push_back(*stream);
          break;
        case Enqueued::Kind::record: events[event] = *stream; break;
        case Enqueued::Kind::wait:
          if (dropped_ != at) join(*stream, events[event]);
          break;
        case Enqueued::Kind::wait_for_peers:
          if (dropped_ == at) break;
          if (meeting.ended.size() < all) return false;
          for (auto const& ended : meeting.ended) join(*stream, ended);
          break;
        case Enqueued::Kind::await_stream: join(host, *stream); break;
        case Enqueued::Kind::await_event: join(host, events[event]); break;
        case Enqueued::Kind::exchange:
          if (!arrive(rank, meeting, host, entry, nullptr)) return false;
          for (auto const& begun : meeting.begun) join(host, begun);
          break;
      }
      ++next_[rank];
      came_[rank] = 0;
      return true;
    }
    /// @return whether all members have arrived
    bool arrive(std::size_t rank, Meeting& meeting, Clock const& clock, Enqueued const& entry,
                std::vector<Cells> const* input) {
      if (std::exchange(came_[rank], 1) == 0) {
        meeting.begun.push_back(clock);
        meeting.members.push_back(entry.member);
        meeting.inputs.push_back(input);
      }
      return meeting.begun.size() == static_cast<std::size_t>(entry.members);
    }

    void access(At at, std::size_t actor, std::vector<Cells> const& list, std::size_t meeting, bool own) {
      auto const& clock = clocks_[actor];
      Stamp const now{actor, clock[actor], meeting, at};
      auto const expect_before = [&](Stamp const& then) {
        bool const ordered = then.number == 0 || clock[then.actor] >= then.number;
        if (ordered || (meeting != 0 && then.meeting == meeting)) return;
        if (found_.size() < most_ && (found_.empty() || now_ != at || then_ != then.at))
          found_.push_back(formatted("{} and {} are not ordered", text(then.at), text(at)));
        now_ = at, then_ = then.at;
      };
      for (auto const& cells : list)
        for (auto i = cells.first; i < cells.last; ++i) {
          auto& cell = memory_[i];
          expect_before(cell.write);
          if (own && cells.writes) {
            for (auto const& read : cell.reads) expect_before(read);
            cell.reads.clear();
            cell.write = now;
            continue;
          }
          auto const mine = std::find_if(cell.reads.begin(), cell.reads.end(),
                                         [&](Stamp const& read) { return read.actor == actor; });
          if (mine == cell.reads.end()) {
            cell.reads.push_back(now);
          } else {
            *mine = now;
          }
        }
    }
    std::string text(At at) const {
      auto const& entry = all_.at(at);
      return formatted("rank {}, {}, operation {}: {}", at.rank,
                       all_.ranks_[at.rank]->streams[static_cast<std::size_t>(entry.stream)], at.entry, entry.what);
    }

    Hazards const& all_;
    std::optional<At> dropped_;
    std::size_t most_;
    std::vector<std::size_t> next_;
    std::vector<char> came_;  ///< by rank: it has arrived at the meeting that is its next entry
    std::vector<Clock> clocks_;
    std::vector<std::vector<Clock>> events_;
    std::vector<Meeting> meetings_;
    std::vector<Cell> memory_;
    std::vector<std::string> found_;
    std::optional<At> now_, then_;
  };

  Recordings ranks_;
  std::vector<std::size_t> first_actor_;  ///< by rank: its host thread; its streams follow
  std::size_t actors_ = 0;
  std::vector<std::uintptr_t> cuts_;
  std::map<std::tuple<bool, std::string, std::uint64_t>, std::size_t> meetings_;
  std::vector<std::vector<Place>> places_;
};

}  // namespace fsdp::testing
