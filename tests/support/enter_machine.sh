#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# enter_machine.sh ADDRESS COMMAND...: the "remote shell" of mpirun for machines of namespaces. Their folder is FSDP_MACHINES.
number=$((${1##*.} - 1))
shift
keeper=$(cat "$FSDP_MACHINES/$number.pid") || exit 1
here=$PWD
export here
exec nsenter --target "$keeper" --net --uts --mount --ipc sh -c 'cd "$here" && unset here && eval "$1"' sh "$*"
