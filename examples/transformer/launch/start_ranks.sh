#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Entry point of a container: starts the ranks of one node, a process for each GPU, which find each other over TCP and train
# over NCCL. It takes their places from the index that Kubernetes gives the pod.
#
#   start_ranks.sh PROGRAM ARGUMENT...
#
#   index of the node       NODE_RANK, else PET_NODE_RANK (TrainJob), else JOB_COMPLETION_INDEX (Job, JobSet)
#   number of nodes         NODES, else PET_NNODES
#   ranks of a node         RANKS_PER_NODE, else PET_NPROC_PER_NODE if that is a number, else the GPUs that nvidia-smi lists
#   where rank 0 listens    MASTER_ADDR, else PET_MASTER_ADDR: the name of the pod with index 0
#                           MASTER_PORT, else PET_MASTER_PORT, else 29500
#   seconds until SIGKILL   RANKS_GRACE, else 10: when a rank has failed, the others first get SIGTERM
#
# SIGUSR1, SIGTERM and SIGINT ask the ranks once to save and stop, also if several come: Kubernetes sends SIGTERM after a
# preStop hook, and a second signal would stop the ranks at once. If a rank fails, the others are ended: they wait for it.
# The exit code is that of the first rank that failed; 85 if all have saved and stopped; else 0.
set -uo pipefail

die() { echo "start_ranks.sh: error: $*" >&2; exit 2; }
(($# > 0)) || die "expected a program"

# number NAME VALUE LEAST MOST: is a whole number of this range
number() {
  [[ $2 =~ ^(0|[1-9][0-9]{0,6})$ ]] && (($2 >= $3 && $2 <= $4)) || die "$1: expected a whole number from $3 to $4, got '$2'"
}
most_ranks=1048576 # WORLD_SIZE of a run: 2^20, as the library has it
node=${NODE_RANK:-${PET_NODE_RANK:-${JOB_COMPLETION_INDEX:-}}}
nodes=${NODES:-${PET_NNODES:-}}
each=${RANKS_PER_NODE:-${PET_NPROC_PER_NODE:-}}
grace=${RANKS_GRACE:-10}
[[ -n $node ]] || die "NODE_RANK, PET_NODE_RANK and JOB_COMPLETION_INDEX are not set: expected the index of this pod"
[[ -n $nodes ]] || die "NODES and PET_NNODES are not set: expected the number of pods"
if [[ -z $each || $each == auto || $each == gpu ]]; then each=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU'); fi
number "index of the node" "$node" 0 $most_ranks
number "number of nodes" "$nodes" 1 $most_ranks
number "ranks of a node" "$each" 1 $most_ranks
number RANKS_GRACE "$grace" 0 9999999
((node < nodes)) || die "index of the node: expected a number below the $nodes nodes, got $node"
export MASTER_ADDR=${MASTER_ADDR:-${PET_MASTER_ADDR:-}} MASTER_PORT=${MASTER_PORT:-${PET_MASTER_PORT:-29500}}
((nodes * each <= most_ranks)) || die "WORLD_SIZE: expected at most $most_ranks ranks, got $nodes nodes with $each each"
if ((nodes * each > 1)); then number MASTER_PORT "$MASTER_PORT" 1 65535; fi # one rank needs none
[[ -n $MASTER_ADDR || $((nodes * each)) == 1 ]] || die "MASTER_ADDR and PET_MASTER_ADDR are not set: expected the name of the pod with index 0"

# A signal is passed on by the loop below, when all ranks are started: once to each.
ranks=() asked=0 passed_on=0
trap 'asked=$((asked + 1))' USR1 TERM INT

export WORLD_SIZE=$((nodes * each))
for ((local_rank = 0; local_rank < each; ++local_rank)); do
  # A program that does not handle SIGUSR1 yet must not die of it.
  (
    trap '' USR1
    RANK=$((node * each + local_rank)) LOCAL_RANK=$local_rank exec "$@"
  ) &
  ranks+=($!)
done

# end_others: the second SIGTERM makes a rank say what it waits for, and stop; SIGKILL is for what does not.
end_others() {
  local left=$((grace * 4))
  kill -TERM "${ranks[@]}" 2> /dev/null
  sleep 0.5
  while kill -TERM "${ranks[@]}" 2> /dev/null && ((left-- > 0)); do sleep 0.25; done
  kill -KILL "${ranks[@]}" 2> /dev/null
}

# collect PLACE: takes the exit code of a rank that has ended.
code=0
collect() {
  local one again before=$asked
  wait "${ranks[$1]}"
  one=$?
  if ((one > 128 && asked != before)); then # a signal may have ended the wait before it had the code
    wait "${ranks[$1]}"
    again=$?
    if ((again != 127)); then one=$again; fi
  fi
  unset "ranks[$1]"
  if ((one == 85 && code == 0)); then code=85; fi
  if ((one == 0 || one == 85 || (code != 0 && code != 85))); then return; fi
  code=$one
  echo "start_ranks.sh: a rank has ended with $one; the others of this node are ended" >&2
  if ((${#ranks[@]} > 0)); then end_others; fi
}
# `wait -n` would miss ranks that end while others are ended. The pause is no `wait` either: where a trapped signal interrupts
# bash's `wait`, bash can lose the code of a child that ends at that moment, and then takes the child for running for ever.
while ((${#ranks[@]} > 0)); do
  if ((asked && !passed_on)); then
    passed_on=1
    kill -USR1 "${ranks[@]}" 2> /dev/null
  fi
  sleep 0.2
  running=" $(jobs -rp | tr '\n' ' ')"
  for place in "${!ranks[@]}"; do
    if [[ $running != *" ${ranks[place]} "* ]]; then collect "$place"; fi
  done
done
exit "$code"
