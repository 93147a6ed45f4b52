#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The sharded trainer of examples/libtorch prints the losses of the other one, on one rank and on three.
# usage: example.sh TRAIN TRAIN_SHARDED
# programs: libtorch_train libtorch_train_sharded
set -euo pipefail
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none                          # Open MPI 4
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none  # Open MPI 5
plain=$("$1")
[[ $(grep -c '^step .*: loss ' <<<"$plain") == 10 ]] || { echo "expected ten losses, got: $plain"; exit 1; }
for ranks in 1 3; do
  sharded=$(mpirun -n "$ranks" "$2")
  paste -d' ' <(echo "$plain") <(echo "$sharded") | awk -v ranks="$ranks" '
    { if ($2 != $6 || $4 - $8 > 2e-5 || $8 - $4 > 2e-5) { print ranks " ranks: " $0; bad = 1 } }
    END { exit bad || NR != 10 }' || { echo "losses differ on $ranks ranks"; exit 1; }
done
