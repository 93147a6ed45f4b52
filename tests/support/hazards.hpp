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

#include "fsdp/detail/base/format.hpp"
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

  /// @param dropped  waits that are left out
  /// @param most     stops when so many were found
  /// @return one text for each
  std::vector<std::string> find(std::vector<At> const& dropped = {}, std::size_t most = 20) const {
    Run run(*this, dropped, most);
    return run.find();
  }
  /// From what else a stream knows what it waits for.
  enum class Known : unsigned char {
    nothing,
    later_waits,  ///< that come before its next operation
    host,         ///< it has waited for it
    stream        ///< its earlier waits and collectives
  };
  struct Wait {
    At at;
    Known known{};
  };
  /// Waits of streams, for events and for peers, in the order of the streams' next operations. By rank.
  std::vector<std::vector<Wait>> known_waits() const {
    Run run(*this, {}, 1);
    static_cast<void>(run.find());
    return run.known();
  }
  /// By entry: whether it is a wait of a rank without which some accesses are not ordered. One run finds all: a copy of
  /// it goes on from each wait as if that were not there.
  std::vector<bool> needed_waits(std::size_t rank) const {
    std::vector<bool> needed(ranks_[rank]->entries.size()), asked(needed.size());
    Run run(*this, {}, 1);
    static_cast<void>(run.find([&](At next) {
      auto const kind = at(next).kind;
      bool const waits = kind == Enqueued::Kind::wait || kind == Enqueued::Kind::wait_for_peers;
      if (next.rank != rank || !waits || asked[next.entry]) return;
      asked[next.entry] = true;
      needed[next.entry] = run.finds_without(next);
    }));
    return needed;
  }
  Recording const& recording(std::size_t rank) const { return *ranks_[rank]; }
  Enqueued const& at(At entry) const { return ranks_[entry.rank]->entries[entry.entry]; }

 private:
  using Clock = std::vector<std::uint32_t>;
  static void join(Clock& into, Clock const& other) {
    for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
  }
  static void add(Clock& sum, Clock const& other) {
    if (sum.empty()) sum.resize(other.size());
    join(sum, other);
  }
  static bool is_within(Clock const& clock, Clock const& other) {
    for (std::size_t i = 0; i < clock.size(); ++i)
      if (clock[i] > other[i]) return false;
    return true;
  }

  /// Consecutive bytes that every access of the run takes whole or not at all.
  struct Cells {
    std::size_t first, last;
    bool writes;
  };
  /// The part of an entry that is equal in every run.
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
    Run(Hazards const& all, std::vector<At> dropped, std::size_t most)
        : all_(all),
          dropped_(std::move(dropped)),
          most_(most),
          next_(all.ranks_.size(), 0),
          came_(all.ranks_.size(), 0),
          clocks_(all.actors_, Clock(all.actors_, 0)),
          waits_(all.actors_),
          known_(all.ranks_.size()),
          meetings_(all.meetings_.size() + 1),
          memory_(all.cuts_.size()) {
      for (auto const& recording : all.ranks_)
        events_.emplace_back(static_cast<std::size_t>(recording->events), Clock(all.actors_, 0));
    }

    std::vector<std::string> find() {
      return find([](At) {});
    }
    /// @param before  is called before each entry is taken, and where it has to wait once more
    template <class Before>
    std::vector<std::string> find(Before const& before) {
      for (bool moved = true; moved && found_.size() < most_;) {
        moved = false;
        for (std::size_t rank = 0; rank < next_.size(); ++rank) {
          while (found_.size() < most_ && next_[rank] < all_.ranks_[rank]->entries.size()) {
            before(At{rank, next_[rank]});
            if (!step(rank)) break;
            moved = true;
          }
        }
      }
      for (std::size_t rank = 0; rank < next_.size() && found_.size() < most_; ++rank)
        if (next_[rank] < all_.ranks_[rank]->entries.size())
          throw std::logic_error(
              formatted("rank {} waits for ever at '{}'", rank, all_.ranks_[rank]->entries[next_[rank]].what));
      return found_;
    }
    /// Whether the rest of the run finds something if the next entry of its rank, a wait, is left out.
    bool finds_without(At next) const {
      Run rest = *this;
      rest.dropped_ = {next};
      return !rest.find().empty();
    }
    /// After find(): see known_waits().
    std::vector<std::vector<Wait>> const& known() const { return known_; }

   private:
    /// A wait of a stream since its last operation.
    struct Learnt {
      Wait wait;
      Clock clock;   ///< what it waits for
      Clock before;  ///< what the stream knew
    };
    /// All members of one collective or exchange.
    struct Meeting {
      Clock begun;   ///< all that members whose input is read knew; empty: none has come
      Clock ended;   ///< all that members know at their end; empty: none has
      int ends = 0;  ///< of members
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
      bool const waits = entry.kind == Enqueued::Kind::wait || entry.kind == Enqueued::Kind::wait_for_peers;
      if (stream != nullptr && !waits) end_waits(rank, actor);
      switch (entry.kind) {
        case Enqueued::Kind::operation:
          ++(*stream)[actor];
          access(at, actor, place.accesses, 0, true);
          break;
        case Enqueued::Kind::collective:
          if (!arrive(rank, meeting, *stream, entry, &place.input)) return false;
          join(*stream, meeting.begun);
          ++(*stream)[actor];
          access(at, actor, place.accesses, place.meeting, true);
          for (std::size_t i = 0; i < meeting.members.size(); ++i)
            if (meeting.members[i] != entry.member) access(at, actor, *meeting.inputs[i], place.meeting, false);
          add(meeting.ended, *stream);
          if (++meeting.ends == entry.members) meeting.begun = {}, meeting.inputs = {}, meeting.members = {};
          break;
        case Enqueued::Kind::record: events[event] = *stream; break;
        case Enqueued::Kind::wait:
          if (!is_dropped(at)) learn(at, actor, events[event]);
          break;
        case Enqueued::Kind::wait_for_peers:
          if (is_dropped(at)) break;
          if (meeting.ends < entry.members) return false;
          learn(at, actor, meeting.ended);
          break;
        case Enqueued::Kind::await_stream: join(host, *stream); break;
        case Enqueued::Kind::await_event: join(host, events[event]); break;
        case Enqueued::Kind::exchange:
          if (!arrive(rank, meeting, host, entry, nullptr)) return false;
          join(host, meeting.begun);
          break;
      }
      ++next_[rank];
      came_[rank] = 0;
      return true;
    }
    bool is_dropped(At at) const { return std::find(dropped_.begin(), dropped_.end(), at) != dropped_.end(); }
    void learn(At at, std::size_t actor, Clock const& learnt) {
      auto& clock = clocks_[actor];
      if (dropped_.empty()) {
        auto const by_host = is_within(learnt, clocks_[all_.first_actor_[at.rank]]);
        auto const known = is_within(learnt, clock) ? (by_host ? Known::host : Known::stream) : Known::nothing;
        waits_[actor].push_back({{at, known}, learnt, clock});
      }
      join(clock, learnt);
    }
    /// A stream goes on after its waits.
    void end_waits(std::size_t rank, std::size_t actor) {
      auto& waits = waits_[actor];
      for (std::size_t i = 0; i < waits.size(); ++i) {
        auto [wait, learnt, others] = waits[i];
        for (auto j = i + 1; j < waits.size(); ++j) join(others, waits[j].clock);
        if (wait.known == Known::nothing && is_within(learnt, others)) wait.known = Known::later_waits;
        known_[rank].push_back(wait);
      }
      waits.clear();
    }
    /// @return whether all members have arrived
    bool arrive(std::size_t rank, Meeting& meeting, Clock const& clock, Enqueued const& entry,
                std::vector<Cells> const* input) {
      if (std::exchange(came_[rank], 1) == 0) {
        if (entry.root < 0 || entry.member == entry.root) add(meeting.begun, clock);
        meeting.members.push_back(entry.member);
        meeting.inputs.push_back(input);
      }
      return meeting.members.size() == static_cast<std::size_t>(entry.members);
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
            // Peers may still read the cells of this collective when it has ended here.
            std::erase_if(cell.reads, [&](Stamp const& read) { return meeting == 0 || read.meeting != meeting; });
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
    std::vector<At> dropped_;
    std::size_t most_;
    std::vector<std::size_t> next_;
    std::vector<char> came_;  ///< by rank: it has arrived at the meeting that is its next entry
    std::vector<Clock> clocks_;
    std::vector<std::vector<Clock>> events_;
    std::vector<std::vector<Learnt>> waits_;  ///< by stream
    std::vector<std::vector<Wait>> known_;
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
