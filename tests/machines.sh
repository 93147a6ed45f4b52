#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command over several machines, which are namespaces of this one. Needs root, iproute2, util-linux and Open MPI.
#
#   tests/machines.sh [OPTION...] N [COMMAND...]
#
#   --ranks=2,1      slots of each machine for mpirun; one each otherwise
#   --rate=100mbit   bandwidth of each link
#   --delay=5ms      of each packet
#   --loss=0.1%      packets that are lost
#
# The command runs on machine 0; `mpirun` in it starts ranks on all machines without an option:
#   tests/machines.sh --ranks=2,2 --delay=5ms 2 mpirun build/cpu/examples/nanogpt/nanogpt train ...
# Machine I has the address 10.77.0.(I + 1) and a /dev/shm of its own; files are those of this machine. Without a command, a
# shell. At its end, standard error has the bytes that the machines have sent to each other. Exit code: the command's; 77
# where namespaces cannot be made.
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/support/machines.sh"

usage() { sed -n '3,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit "${1:-2}"; }
ranks=
options=()
while [[ ${1-} == --* ]]; do
  case $1 in
    --help) usage 0 ;;
    --ranks=*) ranks=${1#*=} ;;
    *) options+=("$1") ;;
  esac
  shift
done
[[ ${1-} =~ ^[1-9][0-9]?$ ]] || usage
count=$1
shift
[[ -n $ranks ]] || ranks=$(printf '1 %.0s' $(seq "$count"))
read -ra slots <<< "${ranks//,/ }"
if ((${#slots[@]} > count)); then
  echo "machines.sh: --ranks=${ranks// /,} has ${#slots[@]} machines, and there are $count" >&2
  exit 2
fi
machines_expect
trap '((BASHPID != $$)) || machines_down' EXIT
trap 'exit 130' INT TERM HUP
machines_up "$count" "${options[@]}" || exit 1
before=$(machines_bytes)
if (($# == 0)); then
  machines_run "${ranks//,/ }" bash
else  # behind, so that a signal to this script ends all of it at once
  machines_run "${ranks//,/ }" "$@" <&0 &
  wait $!
fi
code=$?
echo "bytes over the machines' links: $(($(machines_bytes) - before))" >&2
exit "$code"
