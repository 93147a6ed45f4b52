#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The sharded trainer of examples/libtorch prints the losses of the other one, on one rank and on three.
# usage: example.sh TRAIN TRAIN_SHARDED
# programs: libtorch_train libtorch_train_sharded
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../support/mpirun.sh"
plain=$("$1")
[[ $(grep -c '^step .*: loss ' <<<"$plain") == 10 ]] || { echo "expected ten losses, got: $plain"; exit 1; }
for ranks in 1 3; do
  sharded=$(mpirun -n "$ranks" "$2")
  paste -d' ' <(echo "$plain") <(echo "$sharded") | awk -v ranks="$ranks" '
    { if ($2 != $6 || $4 - $8 > 2e-5 || $8 - $4 > 2e-5) { print ranks " ranks: " $0; bad = 1 } }
    END { exit bad || NR != 10 }' || { echo "losses differ on $ranks ranks"; exit 1; }
done
