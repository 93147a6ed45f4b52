// SPDX-License-Identifier: Apache-2.0
// A mesh: the ranks of a run, with their communicator. Exchanges of texts over any communicator: ranks send them to
// rank 0, which answers all. The concept of communicators is in concepts.hpp.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The world of ranks, which engines divide by their strategies. Must outlive them.
template <Communicator C>
class Mesh {
 public:
  using Comm = C;

  explicit Mesh(C world) : world_(std::move(world)) {}

  C& world() { return world_; }
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  typename C::Device const& device() const { return world_.device(); }

  /// Numbers the engines of this mesh from 1, in the order in which they are made: ranks compare the numbers when they
  /// seal. Used by Engine.
  int number_engine() { return ++engines_; }
  /// Frees the number of an engine that was never sealed, if no other engine was made after it.
  void forget_engine(int number) {
    if (number == engines_) --engines_;
  }

 private:
  C world_;
  int engines_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm {

/// Gathers a text of every rank on rank 0, and broadcasts its answer. Rank 0 receives every text once, and sends the
/// answer once to each rank, so its traffic grows linearly with the number of ranks; `exchange` sends every text to
/// every rank.
/// @param world   a communicator. One without a `consult` of its own exchanges the texts, and every rank computes the
///                answer
/// @param what    the texts are, in a word or two: equal on all ranks
/// @param answer  called with the texts in the order of ranks; returns a std::string. It depends on nothing else, and
///                throws nothing: rank 0 may call it for all
/// @return the answer, on every rank
/// @throws OrderError on every rank if their `what` differ
/// @note Collective: yes; blocks.
template <class C, class Answer>
std::string consult(C& world, std::string const& mine, std::string_view what, Answer const& answer) {
  if constexpr (requires { world.consult(mine, what, answer); })
    return world.consult(mine, what, answer);
  else
    return answer(world.exchange(mine, what));
}

/// Answers with rank 0's text, or with "" if there is none.
inline std::string text_of_first(std::vector<std::string> const& texts) {
  return texts.empty() ? std::string() : texts.front();
}
/// Answers with the text of the lowest rank that has one.
inline std::string first_text(std::vector<std::string> const& texts) {
  for (auto const& text : texts)
    if (!text.empty()) return text;
  return {};
}
/// Answers with "". The call shows that all ranks have come.
inline std::string no_text(std::vector<std::string> const& /*texts*/) { return {}; }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm
