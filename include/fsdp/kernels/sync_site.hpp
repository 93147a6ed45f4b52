// SPDX-License-Identifier: Apache-2.0
// The number of every block barrier of the kernels. A test that runs thread blocks on the host drops them one at a
// time: each must be missed.
#pragma once

#include <array>
#include <string_view>

namespace fsdp {

/// Where the threads of a block wait for each other. `none` is for barriers of user code; programs that want theirs
/// tested number them from `first_of_programs`.
enum class SyncSite : int {
  none = 0,
  reduction_slots_free,     ///< until an earlier reduction has read the slots that this one writes
  reduction_slots_written,  ///< until every warp has written its slot
  first_of_programs = 1000
};

/// A site and its name in messages.
struct NamedSyncSite {
  SyncSite site;
  std::string_view name;
};

/// Every site of the library.
inline constexpr std::array<NamedSyncSite, 2> sync_sites{{
    {SyncSite::reduction_slots_free, "reduction_slots_free"},
    {SyncSite::reduction_slots_written, "reduction_slots_written"},
}};

/// Name of a site of the library; of a program's, "program".
constexpr std::string_view name(SyncSite site) {
  for (auto const& known : sync_sites)
    if (known.site == site) return known.name;
  return site == SyncSite::none ? "none" : "program";
}

}  // namespace fsdp
