// SPDX-License-Identifier: Apache-2.0
// The symbolic content of a cell.
#pragma once

#include <compare>
#include <cstdint>
#include <map>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// A term of a sum of gradients: the contribution of one use in one micro-step.
struct Term {
  std::uint32_t micro_step = 0;
  std::uint32_t use = 0;  ///< its place in the path
  friend auto operator<=>(Term const&, Term const&) = default;
};
/// The share of a term in a sum.
struct Share {
  int times = 1;  ///< how often it was added
  int ranks = 1;  ///< over which it is summed
  friend auto operator<=>(Share const&, Share const&) = default;
};

/// The content of a cell.
struct Symbol {
  enum class Kind : unsigned char { nothing, zeroes, parameters, gradients };

  Kind kind = Kind::nothing;
  bool used_up = false;  ///< nothing may read it any more
  bool padded = false;   ///< elements that belong to no tensor may be other than zero
  bool hooked = false;   ///< for gradients: functions of the caller have seen this sum
  std::uint32_t unit = 0;
  std::uint32_t step = 0;         ///< for parameters: number of updates before them
  std::map<Term, Share> terms{};  ///< of gradients

  bool holds(Kind what) const { return kind == what && !used_up; }
  /// Adds to a sum of gradients.
  void count(Term term, Share share) {
    auto const [entry, is_new] = terms.try_emplace(term, share);
    if (!is_new) entry->second.times += share.times, entry->second.ranks = share.ranks;
    hooked = false;
  }
  void merge(Symbol const& more) {
    for (auto const& [term, share] : more.terms) count(term, share);
    padded = padded || more.padded;
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
