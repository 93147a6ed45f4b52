// SPDX-License-Identifier: Apache-2.0
// Flags of a micro-step. An operation of a program runs under some of them.
#pragma once

#include <array>
#include <cstddef>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Flags of a micro-step, in four groups: exactly one bit of each group is set. An operation lists the flags under
/// which it runs; if it does not depend on a group, it has all bits of the group.
enum Facts : unsigned {
  starts_sharded = 1u << 0,    ///< forward begins without parameters of an earlier backward pass
  starts_unsharded = 1u << 1,  ///< forward begins with all of them
  drops = 1u << 2,             ///< backward drops parameters
  keeps = 1u << 3,             ///< backward leaves them
  syncs_none = 1u << 4,        ///< gradients stay on their rank
  syncs_group = 1u << 5,       ///< gradients are reduced within shard groups
  syncs_all = 1u << 6,         ///< gradients are reduced over all ranks
  nothing_waits = 1u << 7,     ///< all gradients of earlier micro-steps are reduced
  sums_wait = 1u << 8,         ///< sums within shard groups wait for replicas
  gradients_wait = 1u << 9,    ///< gradients of earlier micro-steps are unreduced; sums may also wait for replicas
  any_facts = (1u << 10) - 1
};
constexpr Facts operator~(Facts a) { return static_cast<Facts>(~unsigned{a} & unsigned{any_facts}); }
constexpr Facts operator|(Facts a, Facts b) { return static_cast<Facts>(unsigned{a} | unsigned{b}); }
constexpr Facts operator&(Facts a, Facts b) { return static_cast<Facts>(unsigned{a} & unsigned{b}); }
/// The bits of each group.
inline constexpr Facts start_answers = starts_sharded | starts_unsharded, drop_answers = drops | keeps,
                       sync_answers = syncs_none | syncs_group | syncs_all,
                       waiting_answers = nothing_waits | sums_wait | gradients_wait;
inline constexpr std::array<unsigned, 4> questions{start_answers, drop_answers, sync_answers, waiting_answers};
/// @return a mask: in a group that `answers` names, only those flags; in all other groups, every flag
constexpr Facts only(Facts answers) {
  unsigned facts = 0;
  for (auto const question : questions) facts |= (answers & question) != 0 ? answers & question : question;
  return static_cast<Facts>(facts);
}
/// A micro-step that begins and ends with sharded parameters and reduces its gradients, after one like it.
inline constexpr Facts plain_step = starts_sharded | drops | syncs_all | nothing_waits;
/// Flags that a micro-step sets for the next one.
constexpr Facts left_by(Facts facts) {
  return ((facts & keeps) != 0 ? starts_unsharded : starts_sharded) | ((facts & syncs_none) != 0    ? gradients_wait
                                                                       : (facts & syncs_group) != 0 ? sums_wait
                                                                                                    : nothing_waits);
}

/// A scope of an engine that changes backward passes. The first three clear one of the flags below while they are open.
enum class BackwardChange : unsigned char { no_sync, no_replica_sync, keep_unsharded, frozen_parameters };
inline constexpr std::size_t backward_changes = 4;

constexpr char const* name(BackwardChange change) {
  constexpr std::array<char const*, backward_changes> names{"no_sync", "no_replica_sync", "keep_unsharded",
                                                            "frozen_parameters"};
  return names[static_cast<std::size_t>(change)];
}

/// Flags of a backward pass, which decide what happens to a unit at its end. Scopes set them when the pass begins.
struct BackwardFlags {
  bool gradient_sync = true;  ///< reduces gradients
  bool replica_sync = true;   ///< reduces over replicas too
  bool reshard = true;        ///< drops parameters

  constexpr Facts facts() const {
    return (reshard ? drops : keeps) | (!gradient_sync ? syncs_none : replica_sync ? syncs_all : syncs_group);
  }
};
/// The flags of all kinds of backward passes.
inline constexpr std::array<BackwardFlags, 6> every_backward_flags{{{true, true, true},
                                                                    {true, false, true},
                                                                    {false, true, true},
                                                                    {true, true, false},
                                                                    {true, false, false},
                                                                    {false, true, false}}};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
