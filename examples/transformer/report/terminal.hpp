// SPDX-License-Identifier: Apache-2.0
// The terminal that a person reads standard output on.
#pragma once

namespace transformer {

/// Columns of the terminal that standard output goes to, 80 if it does not tell; 0 if it goes elsewhere.
///
/// [Note: Terminals below mpirun]
/// mpirun gives each rank a pseudo-terminal of its own, and passes on what comes out of it to its own standard output,
/// wherever that leads: what isatty says of a rank's standard output is no answer. So the launcher's is looked at: that
/// of the nearest ancestor named mpirun, mpiexec, orterun or prterun (Linux, /proc). A rank on another machine, or
/// below srun, has no such ancestor; it has no terminal then. NANOGPT_PROGRESS=1 or 0 decides instead of all this.
int terminal_columns();

}  // namespace transformer
