// SPDX-License-Identifier: Apache-2.0
// How an emulated thread block runs: its schedule, and the barriers that it leaves out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/error.hpp"
#include "tests/support/fiber.hpp"

namespace emulated {

/// A fault of a kernel in a thread block: a barrier that not all reach, a shuffle without the whole warp, a write over
/// what the warp has read together.
struct Failure : fsdp::Error {
  using fsdp::Error::Error;
};
using fsdp::fail;

/// [Note: Schedules]
/// A GPU runs warps in any order, so a kernel must be right in all. Forward, reverse and shuffled advance all warps
/// about evenly: each thread runs up to its next barrier or collective of its warp. Greedy runs one warp up to the
/// block's next barrier, through all its collectives, before another runs at all: the warp that is far ahead meets
/// what the others have not read yet, so that a missing trailing barrier shows.
enum class Schedule : unsigned char { forward, reverse, shuffled, greedy_forward, greedy_reverse };
inline constexpr std::array<Schedule, 5> schedules{Schedule::forward, Schedule::reverse, Schedule::shuffled,
                                                   Schedule::greedy_forward, Schedule::greedy_reverse};
constexpr std::string_view name(Schedule schedule) {
  constexpr std::array<std::string_view, 5> names{"forward", "reverse", "shuffled", "greedy forward", "greedy reverse"};
  return names[static_cast<std::size_t>(schedule)];
}

/// Places of barriers, in order.
struct SiteOrder {
  bool operator()(fsdp::SyncSite const& a, fsdp::SyncSite const& b) const {
    int const files = a.file == b.file ? 0 : std::strcmp(a.file, b.file);
    return files != 0 ? files < 0 : a.line < b.line;
  }
};
using Sites = std::set<fsdp::SyncSite, SiteOrder>;
inline bool same(fsdp::SyncSite const& a, fsdp::SyncSite const& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}
inline std::string text(fsdp::SyncSite const& site) {
  return *site.file == 0 ? std::to_string(site.line) : fsdp::formatted("{}:{}", site.file, site.line);
}

struct Options {
  Schedule schedule = Schedule::forward;
  std::uint64_t seed = 1;                   ///< of `shuffled`
  std::optional<fsdp::SyncSite> drop = {};  ///< barriers of this place do nothing
  std::int64_t* dropped = nullptr;          ///< counts the threads that passed a dropped barrier
  Sites* met = nullptr;                     ///< gets the place of every barrier that a thread comes to
  Stacks* stacks = nullptr;                 ///< of the block's threads; nullptr: the calling thread's own
};

}  // namespace emulated
