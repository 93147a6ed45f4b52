# shellcheck shell=bash disable=SC2034  # variables that run.sh uses
# SPDX-License-Identifier: Apache-2.0
# Chooses the launcher and the number of ranks for run.sh. Sourced.

# GPUs that a process sees.
count_gpus() {
  local gpus shown
  gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU')
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    shown=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]')
    if ((shown < gpus)); then gpus=$shown; fi
  fi
  echo "$gpus"
}

# choose_launch PRESET BUILD NANOGPT: sets ranks (RANKS, else one a GPU, or 2), launch (the words before nanogpt), rank_settings
# (nanogpt's own) and how (in words). On several GPUs ranks are processes with one each, if the program has NCCL and MPI.
choose_launch() {
  local mpirun gpus=0 processes=yes missing
  mpirun=$(sed -n 's/^MPIEXEC_EXECUTABLE:[A-Z]*=//p' "$2/CMakeCache.txt")
  launch=() rank_settings=()
  ranks=${RANKS:-2}
  how="$ranks processes, by mpirun"
  if ((ranks == 1)); then how="1 process, by mpirun"; fi
  if [[ $1 == cuda ]]; then
    gpus=$(count_gpus)
    missing=$("$3" --version | sed -nE 's/^(MPI|NCCL): not built in$/\1/p' | tr '\n' ' ')
    if ((gpus < 2)); then
      processes=no how="$ranks threads, which share the GPU"
    elif [[ -n $missing ]]; then
      processes=no how="$ranks threads, which share the first of $gpus GPUs: to use all, install ${missing% }"
    elif ((ranks > gpus)); then
      processes=no how="$ranks threads, which share the first of $gpus GPUs: RANKS=$gpus uses all"
    else
      ranks=${RANKS:-$gpus} how="$ranks processes with a GPU each, by mpirun and NCCL (this machine has $gpus)"
    fi
  fi
  if [[ $processes == no ]]; then
    rank_settings=(--ranks="$ranks")
    return
  fi
  launch=("$mpirun" -n "$ranks") # the launcher that CMake found beside the library
  if "$mpirun" --version 2>&1 | grep -qiE 'open ?mpi|open-mpi|openrte|prte'; then
    launch+=(--oversubscribe --bind-to none)
    # On one machine Open MPI 5 asks the kernel for routes between its own addresses, and warns in containers that have none.
    if [[ -z ${hosts-} ]]; then export OMPI_MCA_reachable=${OMPI_MCA_reachable-weighted}; fi
  fi
}
