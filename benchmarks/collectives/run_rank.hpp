// SPDX-License-Identifier: Apache-2.0
// The measurement of one rank, over any communicator.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "overlap.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "table.hpp"
#include "units.hpp"

namespace bench {

/// Keeps the calling thread, and those that it will start, on one of the cores that it may use.
inline void bind_to_core(int rank) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0)
    fsdp::fail<fsdp::ResourceError>("--bind: sched_getaffinity");
  std::vector<std::size_t> cores;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cores[static_cast<std::size_t>(rank) % cores.size()], &one);
  if (::sched_setaffinity(0, sizeof one, &one) != 0) fsdp::fail<fsdp::ResourceError>("--bind: sched_setaffinity");
}

/// @return the exit code. @note Collective: yes.
template <class Vendor, fsdp::Communicator C>
int run_rank(C comm, Settings const& settings, std::string const& device) {
  if (settings.bind) bind_to_core(comm.rank());
  Report report(settings, comm.size(), device, comm.rank() == 0);
  switch (settings.mode) {
    case Mode::table:
      with_type(settings.type, [&]<class T>() { Table<C, T, Vendor>(comm, settings, report).run(); });
      break;
    case Mode::overlap: Overlap<C>(comm, settings, report).run(); break;
    case Mode::units:
    case Mode::sweep: run_units(std::move(comm), settings, report); break;
  }
  return report.finish();
}

}  // namespace bench
