// SPDX-License-Identifier: Apache-2.0
// Errors about parameters and gradients that an incomplete call has left.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/step/contents.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Throws: an optimizer step, an import or a load was interrupted, so only some parameters are new.
/// @param what     the refused action. @param writing  the writer of parameters
/// @param stepped  by unit: the step updates it; nullptr: the writer is no step
template <class Units>
[[noreturn, gnu::cold]] void refuse_half_parameters(int rank, std::string_view what, std::string_view writing,
                                                    Units const& units, step::Contents const& contents,
                                                    FixedArray<bool> const* stepped) {
  std::string done, missing;
  for (std::size_t u = 0; u < units.size(); ++u) {
    auto const& unit = *units[u];
    if (!unit.trains() || (stepped != nullptr && !(*stepped)[u])) continue;
    auto& list = contents[u].gradient == step::Contents::Gradient::sum ? missing : done;
    list += formatted("{}'{}'", list.empty() ? "" : ", ", unit.name());
  }
  auto const list_of_units = stepped == nullptr
                                 ? std::string()
                                 : formatted(": units updated: {}; not updated: {}", done.empty() ? "none" : done,
                                             missing.empty() ? "none" : missing);
  fail<UsageError>("rank {}: {}, but {} is incomplete{}. Load a checkpoint, or import all parameters, on all ranks",
                   rank, what, writing, list_of_units);
}
/// Throws: a scope that a pass needs has ended before a use in it.
/// @param why  the scope's end
[[noreturn, gnu::cold]] inline void refuse_cut_use(int rank, std::string_view pass, std::string_view module,
                                                   std::string_view why) {
  fail<UsageError>(
      "rank {}: {} of '{}' ends, but {} inside it, so the pass was dropped. End a use before the scope that it began "
      "in",
      rank, pass, module, why);
}
/// Throws: a backward pass is incomplete.
/// @param what  the refused action. @param activations  the pass writes no gradients of parameters
template <class Declaration>
[[noreturn, gnu::cold]] void refuse_half_gradients(int rank, std::string_view what, Declaration const& declared,
                                                   bool activations) {
  auto const& schedule = declared.schedule();
  schedule.expect_closed(what);
  if (activations)
    fail<UsageError>(
        "rank {}: {}, but a backward pass inside frozen_parameters() is incomplete. Complete it, or call "
        "discard_gradients()",
        rank, what);
  std::string done, missing;
  auto const& order = schedule.order();
  for (auto use = order.size(); use-- > 0;) {
    if (!order.first_use_of_unit(use)) continue;
    auto& list = schedule.backward_done(use) ? done : missing;
    for (auto const& unit : declared.units())
      if (unit->first == order.unit(use) && !unit->frozen)
        list += formatted("{}'{}'", list.empty() ? "" : ", ", unit->name());
  }
  fail<UsageError>(
      "rank {}: {}, but {}: units that have their gradients: {}; units without: {}. {}discard_gradients()", rank, what,
      schedule.backward_broken() ? "an exception has interrupted a backward pass" : "a backward pass is incomplete",
      done.empty() ? "none" : done, missing.empty() ? "none" : missing,
      schedule.backward_broken() ? "Call " : "Complete it, or call ");
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
