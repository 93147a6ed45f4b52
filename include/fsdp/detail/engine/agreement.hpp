// SPDX-License-Identifier: Apache-2.0
// Compares descriptions, and hashes of optimizer steps and of written values, over ranks; carries an error of one rank
// to all ranks.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/format.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Records optimizer steps with their learning rates, discarded gradients, imports, and micro-steps that do not reduce.
/// Ranks that differ in them would train on with different weights. Collectives carry the last event and a hash of all;
/// communicators that compare labels throw an OrderError.
class History {
 public:
  /// @param what  a literal that ends with the name of the value
  void add(std::string_view what, float value) {
    note(what, std::bit_cast<std::uint32_t>(value), Value::real);
    real_ = value;
  }
  void add(std::string_view what, std::int64_t value) {
    note(what, static_cast<std::uint64_t>(value), Value::whole);
    whole_ = value;
  }
  /// Records an event without a number.
  void add(std::string_view what) { note(what, 0, Value::none); }
  /// Counts an event that may come several times in a row. @param what  a literal that ends with the name of their
  /// number
  void count(std::string_view what) { add(what, what_ == what ? whole_ + 1 : 1); }
  /// The last event and the hash of all; "" before the first. Valid until the next add(). Made on demand.
  [[gnu::noinline]] std::string_view text() const {
    if (size_ == 0 && !what_.empty())
      size_ = (kind_ == Value::real    ? formatted_to(text_, "{} {}, history {:x}", what_, real_, hash_)
               : kind_ == Value::whole ? formatted_to(text_, "{} {}, history {:x}", what_, whole_, hash_)
                                       : formatted_to(text_, "{}, history {:x}", what_, hash_))
                  .size();
    return {text_.data(), size_};
  }
  /// The label of a collective that is enqueued now.
  Label label(std::string_view unit, std::string_view pass) const { return {unit, pass, text()}; }

 private:
  enum class Value : unsigned char { none, real, whole };

  void note(std::string_view what, std::uint64_t bits, Value kind) {
    for (auto const more : {hash_name(what), bits}) hash_ = (hash_ ^ more) * 0x9e3779b97f4a7c15u + (hash_ >> 29);
    what_ = what;
    kind_ = kind;
    size_ = 0;
  }

  std::uint64_t hash_ = 0;
  std::string_view what_;
  Value kind_ = Value::none;
  float real_ = 0;
  std::int64_t whole_ = 0;
  mutable std::array<char, 80> text_{};
  mutable std::size_t size_ = 0;
};

/// A unit's layout, a line per tensor.
[[gnu::cold]] inline std::string text_of(std::string_view unit, FlatLayout const& layout) {
  auto lines = formatted("unit '{}'\n", unit);
  for (auto const& tensor : layout.tensors())
    lines += formatted("unit '{}': tensor '{}' ({}) at {}, decay {}, init {}{}\n", unit, tensor.name,
                       listed(tensor.shape), tensor.offset, tensor.decay, to_text(tensor.init),
                       tensor.tag == 0 ? std::string() : formatted(", tag {}", tensor.tag));
  return lines;
}

/// Answer of rank 0: the first rank whose text differs from rank 0's; "" if all are equal.
[[gnu::cold]] inline std::string rank_that_differs(std::vector<std::string> const& texts) {
  for (std::size_t rank = 1; rank < texts.size(); ++rank)
    if (texts[rank] != texts[0]) return formatted("{}", rank);
  return {};
}

/// Answer of rank 0: the first line that differs in two texts, rank 0's and that of the only other rank that sends one.
/// @param texts  "=" and the text of these two
[[gnu::cold]] inline std::string line_that_differs(std::vector<std::string> const& texts) {
  std::size_t other = 1;
  while (texts[other].empty()) ++other;
  auto const line = [](std::string const& text, std::size_t& at) {
    auto const end = std::min(text.find('\n', at), text.size());
    auto const found = text.substr(at, end - at);
    at = std::min(end + 1, text.size());
    return found;
  };
  for (std::size_t a = 1, b = 1; a < texts[0].size() || b < texts[other].size();) {
    auto const ours = line(texts[0], a), theirs = line(texts[other], b);
    if (ours == theirs) continue;
    auto const value = value_that_differs(ours, 0, theirs, static_cast<int>(other));
    return formatted("{}{}rank 0 has \"{}\", rank {} has \"{}\"", value, value.empty() ? "" : "; ", ours, other,
                     theirs);
  }
  return formatted("rank {} has another text than rank 0", other);
}

/// Compares hashes; the texts themselves are sent by rank 0 and the first rank that differs, if one does.
/// @param what the texts are: see Communicator::exchange
/// @throws Failure on every rank if any two ranks' texts differ, naming the first line that does
/// @note Collective: yes.
template <class Failure = ConfigError, class C>
[[gnu::cold]] void expect_equal_texts(C& world, std::string const& mine, std::string_view what) {
  auto const digest = formatted("{} {:016x}", mine.size(), hash_name(mine));
  auto const rank = comm::ask_first_rank(world, digest, what, rank_that_differs);
  if (rank.empty()) return;
  bool const concerned = world.rank() == 0 || formatted("{}", world.rank()) == rank;
  auto const lines = comm::ask_first_rank(world, concerned ? "=" + mine : std::string(), what, line_that_differs);
  fail<Failure>("rank {}: ranks disagree: {}; expected the same on all ranks", world.rank(), lines);
}

/// Answer of rank 0: "=" and the mean of the ranks' doubles, added in the order of ranks; or, if their last lines
/// differ, "!" and two that differ. If one is not, with "!" and two that differ.
[[gnu::cold]] inline std::string mean_of(std::vector<std::string> const& texts) {
  auto const said = [](std::string const& text) { return std::string_view(text).substr(text.rfind('\n') + 1); };
  std::vector<double> mean(texts[0].rfind('\n') / sizeof(double)), theirs(mean.size());
  auto const bytes = mean.size() * sizeof(double);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (said(texts[rank]) != said(texts[0])) {
      auto const value = value_that_differs(said(texts[0]), 0, said(texts[rank]), static_cast<int>(rank));
      return formatted("!{}{}rank 0 averages {}, rank {} averages {}", value, value.empty() ? "" : "; ", said(texts[0]),
                       rank, said(texts[rank]));
    }
    if (bytes != 0) std::memcpy(theirs.data(), texts[rank].data(), bytes);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += theirs[i];
  }
  for (auto& value : mean) value /= static_cast<double>(texts.size());
  std::string answer(1 + bytes, '=');
  if (bytes != 0) std::memcpy(answer.data() + 1, mean.data(), bytes);
  return answer;
}

/// @param history  what ranks have done: must be equal
/// @throws OrderError on every rank if it is not
/// @note Collective: yes; blocks. Rank 0 adds, and sends the mean to all.
template <class C>
[[gnu::cold]] std::vector<double> mean_over_ranks(C& world, std::vector<double> const& values,
                                                  std::string_view history) {
  auto const bytes = values.size() * sizeof(double);
  std::string mine(bytes, '\0');
  if (!values.empty()) std::memcpy(mine.data(), values.data(), bytes);
  mine += formatted("\n{} values", values.size());
  if (!history.empty()) mine += formatted(" after {}", history);
  auto const answer = comm::ask_first_rank(world, mine, "values to average", mean_of);
  if (answer[0] != '=') fail<OrderError>("rank {}: ranks disagree: {}", world.rank(), answer.substr(1));
  std::vector<double> mean(values.size());
  if (!values.empty()) std::memcpy(mean.data(), answer.data() + 1, bytes);
  return mean;
}

/// Hashes of the values that this rank has written, by unit.
class WrittenValues {
 public:
  explicit WrittenValues(std::size_t units = 0) : hashes_(units, 0) {}

  /// Adds the unit's next values. It hashes four lanes of 8 bytes, and takes little longer than reading the values.
  void add(std::size_t unit, std::span<std::byte const> bytes) {
    constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
    std::array<std::uint64_t, 4> lanes{hashes_[unit] ^ bytes.size(), 1, 2, 3}, words{};
    for (std::size_t at = 0; at < bytes.size(); at += sizeof words) {
      auto const part = bytes.subspan(at, std::min(sizeof words, bytes.size() - at));
      words = {};
      std::memcpy(words.data(), part.data(), part.size());
      for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = (std::rotl(lanes[i], 23) ^ words[i]) * odd;
    }
    hashes_[unit] = lanes[0] ^ std::rotl(lanes[1], 16) ^ std::rotl(lanes[2], 32) ^ std::rotl(lanes[3], 48);
    some_ = true;
  }
  /// Text for differing_replicas(): 16 characters for each unit; "" if nothing was written.
  [[gnu::cold]] std::string text() const {
    std::string all;
    if (some_)
      for (auto const hash : hashes_) all += formatted("{:016x}", hash);
    return all;
  }

 private:
  std::vector<std::uint64_t> hashes_;
  bool some_ = false;
};

/// A sentence that names the first unit of which two ranks that keep the same part have written other values; empty:
/// there is none.
/// @param texts    WrittenValues::text() of every rank
/// @param unit_at  the unit of a number below `units`
/// @param what     the values are
template <class UnitAt>
[[gnu::cold]] std::string differing_replicas(std::vector<std::string> const& texts, std::size_t units,
                                             UnitAt const& unit_at, std::string_view what) {
  constexpr std::string_view nothing = "0000000000000000";  // the hash of a rank that has written nothing
  constexpr std::size_t digits = nothing.size();
  auto const hash = [&](std::size_t rank, std::size_t unit) {
    std::string_view const text = texts[rank];
    return text.empty() ? nothing : text.substr(unit * digits, digits);
  };
  for (std::size_t unit = 0; unit < units; ++unit)
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      auto const twin = rank % static_cast<std::size_t>(unit_at(unit).placement().shards);
      if (hash(rank, unit) != hash(twin, unit))
        return formatted(
            "replicas of unit '{}' differ in {}: rank {} was given other values than rank {}. Give every replica the "
            "same values",
            unit_at(unit).name(), what, rank, twin);
    }
  return {};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Answer of rank 0: the error of the lowest rank that has one ("R" or "C", and a text), else rank 0's text.
inline std::string error_or_first(std::vector<std::string> const& texts) {
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank][0] == '=') continue;
    auto const where = texts.size() == 1 ? std::string() : formatted("rank {}: ", rank);
    return texts[rank].substr(0, 1) + where + texts[rank].substr(1);
  }
  return texts[0];
}

/// Runs `act()` and says how it ended: "=" and the text that it returned, or "R" (a ResourceError) or "C" and the text
/// of its error.
template <class Act>
std::string ending_of(Act&& act) {
  try {
    return "=" + std::string(std::forward<Act>(act)());
  } catch (ResourceError const& error) {
    return std::string("R") + error.what();
  } catch (std::exception const& error) {
    return std::string("C") + error.what();
  }
}

/// Agrees on the endings of all ranks (`mine` is from ending_of): see agreed().
template <class C>
std::string agree_on(C& world, std::string_view what, std::string const& mine) {
  auto answer = comm::ask_first_rank(world, mine, what, error_or_first);
  auto const kind = answer[0];
  answer.erase(0, 1);
  if (kind == 'R') fail<ResourceError>("{}", answer);
  if (kind == 'C') fail<ConfigError>("{}", answer);
  return answer;
}

/// Runs `act()` on this rank, which returns a text. If it throws on any rank, every rank throws the same
/// error: that of the lowest rank, a ResourceError where that was one, else a ConfigError.
/// @param what  it is, in a word or two, the same on every rank
/// @return rank 0's text
/// @note Collective: yes; blocks the calling thread.
template <class C, class Act>
std::string agreed(C& world, std::string_view what, Act&& act) {
  return agree_on(world, what, ending_of(std::forward<Act>(act)));
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
