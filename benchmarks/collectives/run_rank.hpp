// SPDX-License-Identifier: Apache-2.0
// One rank's whole measurement, over any communicator.
#pragma once

#include <string>
#include <utility>

#include "overlap.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "table.hpp"
#include "units.hpp"

namespace bench {

/// @return the exit code. @note Collective: yes.
template <class Vendor, fsdp::Communicator C>
int run_rank(C comm, Settings const& settings, std::string const& device) {
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
