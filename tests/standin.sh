#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs nanogpt's CUDA program on a machine without a GPU: builds it on the stand-ins for CUDA, cuBLASLt and NCCL, and runs it.
#
#   tests/standin.sh [-np N] ARGUMENTS...
#
#   -np N        N processes with a stand-in GPU each, over NCCL's stand-in, started by mpirun; without it one process
#   ARGUMENTS    arguments of nanogpt, e.g. train --device=cuda --dataset=shakespeare_char --n_layer=1 --n_embd=32 --n_head=2 --block_size=16
#   JOBS=2       number of compilers at a time
#   FSDP_STANDIN_*   settings of the stand-ins (docs/testing.md, "Stand-ins")
#
# Of CUDA only NVIDIA's headers are needed. An element costs as much as a thousand on the host, so keep models tiny.
set -euo pipefail
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
processes=1
case ${1-} in
  -np) processes=${2:?-np needs a number}; shift 2 ;;
  -h | --help | '') sed -n '3,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
[[ $processes =~ ^[1-9][0-9]*$ ]] || { echo "standin.sh: -np: expected a number of processes, got '$processes'" >&2; exit 2; }
here=$PWD
cd "$source"
say() { printf '== %s\n' "$*" >&2; }
die() { printf 'standin.sh: error: %s\n' "$*" >&2; exit 1; }
. cmake/install_missing.sh
wish_for ninja=ninja-build ccache=ccache
need_tools
use_quick_tools
{
  configure standin
  cmake --build build/standin -j "${JOBS:-2}" --target nanogpt
} >&2
cd "$here"
nanogpt=$source/build/standin/examples/nanogpt/nanogpt
((processes > 1)) || exec "$nanogpt" "$@"
export FSDP_STANDIN_DEVICES=${FSDP_STANDIN_DEVICES:-$processes}
if ((EUID == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
exec mpirun --oversubscribe --bind-to none -np "$processes" "$nanogpt" "$@"
