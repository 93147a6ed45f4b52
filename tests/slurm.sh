#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The scripts for Slurm, on a cluster of two nodes on this machine's loopback (support/slurm_cluster.sh): a job that is asked
# to stop, that loses a rank or that loses a node goes on, and has the losses and the weights of a run that never stopped.
# Skipped without Slurm, munge, the plugin pmix or a trainer with Open MPI; installs nothing.
# programs: nanogpt failure_ranks_mpi
# labels: full
# timeout: 1800
#
#   tests/slurm.sh BUILD [--rounds=3]
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/support/script.sh"
. "$(dirname "${BASH_SOURCE[0]}")/support/slurm_cluster.sh"
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/../examples" && pwd)
build=$(cd "$1" && pwd)
rounds=3
if [[ ${2-} =~ ^--rounds=([1-9][0-9]*)$ ]]; then rounds=${BASH_REMATCH[1]}; fi

skip() { echo "skipped: $*"; exit 77; }
nanogpt=$build/examples/nanogpt/nanogpt
[[ -x $nanogpt ]] || skip "$nanogpt is not built"
missing=$(missing_slurm)
[[ -z $missing ]] || skip "this machine lacks $missing (Debian: slurm-wlm, munge)"
[[ $("$nanogpt" --version) == *"Open MPI"* ]] || skip "nanogpt is built without Open MPI"

enter_with_text "$nanogpt"
at_exit 'end_cluster 2> /dev/null; chmod -R u+w "$folder"; rm -rf "$folder"'
start_cluster "$folder/cluster" > output 2>&1 || {
  cat cluster/log/*.output >> output
  fail "the cluster does not start"
  exit 1
}
[[ $(srun --mpi=list 2>&1) == *pmix* ]] || skip "this Slurm has no plugin pmix"

# Two nodes on one machine take each other's shared memory for their own.
export OMPI_MCA_btl=self,tcp OMPI_MCA_btl_tcp_if_include=lo
export NANOGPT=$nanogpt
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --dropout=0.2 --eval_interval=5 --eval_iters=2 --warmup_iters=3 --lr_decay_iters=40 --log_interval=1 --threads=1
  --checkpoint_interval=3)

state() { scontrol show job "$job" 2> /dev/null | sed -nE 's/^ *JobState=([A-Z_]+) .*/\1/p'; }
is_in() { test "$(state)" = "$1"; }
says() { grep -qE -- "$1" "$name.out"; }
# comes WHAT COMMAND...: fails unless COMMAND becomes true. The limit is for what hangs.
comes() {
  local what=$1
  shift
  checks=$((checks + 1))
  if wait_until 240 "$@"; then return; fi
  { squeue --long; sinfo --Node; cat "$name.out"; tail -n 30 cluster/log/slurmctld.log; } > output 2>&1
  fail "$name: $what"
  scancel "$job"
  return 1
}
# begin NAME: submits a job of four ranks that has no end, and waits until it trains.
begin() {
  name=$1
  echo "max_iters = 1000000" > limit
  : > "$name.out"
  job=$(OUT=$name sbatch --parsable --output="$name.out" --nodes=2 --ntasks-per-node=2 "$examples/nanogpt/deploy/train.sbatch" limit "${small[@]}")
  comes "does not train" says '^iter 6:' && check "$name: the ranks" says '^4 processes \(MPI\), '
}
# end_soon: whatever the job has done, it will do six iterations more.
end_soon() { echo "max_iters = $(($(grep -oE '^\{"kind":"iter","iter":[0-9]+' "$name/log.jsonl" | tail -n 1 | grep -oE '[0-9]+$') + 6))" > limit; }
# losses RUN: lines of three words, of each iteration and evaluation once, unless two values of it differ.
losses() {
  sed -nE -e 's/^\{"kind":"iter","iter":([0-9]+),"loss":([0-9.e-]+),.*/\1 loss \2/p' \
    -e 's/^\{"kind":"eval","iter":([0-9]+),"train_loss":([0-9.e-]+),"val_loss":([0-9.e-]+),.*/\1 train \2\n\1 val \3/p' \
    "$1/log.jsonl" | sort -V -u
}
same_losses() { # same_losses RUN OTHER: those with $of in their line, by $tolerance
  paste -d ' ' <(losses "$1" | grep "$of") <(losses "$2" | grep "$of") | awk -v tolerance="$tolerance" '
    { apart = $3 - $6; if (apart < 0) apart = -apart
      if ($1 != $4 || $2 != $5 || apart > tolerance * $6) { print "differs: " $0; failed = 1 } }
    END { exit failed || NR < 12 }'
}
# never_stopped: compares the job's weights and losses with those of four threads that never stop. Fewer ranks add the same
# losses in another order, with less than 100 roundings of 1.1e-16 each, and evaluate fewer batches (eval_iters of each rank).
never_stopped() {
  local tolerance=0 of=.
  comes "does not end" is_in COMPLETED || return
  "$nanogpt" train limit "${small[@]}" --ranks=4 --out_dir="whole_$name" > output 2>&1 || fail "$name: the run that never stops"
  check "$name: other weights" cmp "$name/model.safetensors" "whole_$name/model.safetensors"
  if says '^2 processes'; then tolerance=1e-14 of=loss; fi
  check "$name: other losses" same_losses "$name" "whole_$name"
  check "$name: notes of the job stay" test -z "$(find "$name" -name '.slurm-*')"
}
rank_on() { # rank_on NODE: the id of one of its ranks
  local id
  for id in $(processes_of "$1"); do
    if [[ $(cat "/proc/$id/comm" 2> /dev/null) == nanogpt ]]; then
      echo "$id"
      return
    fi
  done
}

waits_without() { # waits_without NODE
  local states=(idle idle)
  states[${1#n}]="down*"
  is_in PENDING && nodes_are "${states[@]}"
}

# --- no plugin -------------------------------------------------------------------------------------------------------------
sentence="started by srun without MPI: this process is task 0 of 2 and cannot find the others; start srun with --mpi=pmix"
ends_in_error srun --nodes=2 --ntasks=2 "$nanogpt" train "${small[@]}" --out_dir=none
check "without a plugin: the sentence" grep -q "^nanogpt: error: $sentence" output
check "without a plugin: Open MPI has begun" test "$(grep -ciE 'opal|ompi|direct launched' output)" = 0
program=$build/tests/failure_ranks_mpi
if [[ -x $program ]]; then
  ends_in_error srun --nodes=2 --ntasks=2 "$program" none
  check "without a plugin: the library's sentence" grep -q "$sentence" output
  check "without a plugin: Open MPI has begun" test "$(grep -ciE 'opal|direct launched' output)" = 0
fi

# --- retries are bounded, and a job that is cancelled stays so ----------------------------------------------------------------
name=retries
printf '#!/bin/sh\nexit 75\n' > fails
chmod +x fails
job=$(NANOGPT=$PWD/fails OUT=$name RETRIES=1 sbatch --parsable --output="$name.out" --nodes=2 --ntasks-per-node=2 "$examples/nanogpt/deploy/train.sbatch")
comes "does not give up" is_in FAILED
check "$name: was not retried" says '^slurm.sh: exit code 75; retry 1 of 1; the job is requeued$'
check "$name: does not say why" says '^slurm.sh: exit code 75; the job has been retried 1 times in a row \(RETRIES=1\) and ends$'
if begin cancelled; then
  scancel "$job"
  comes "is not cancelled" is_in CANCELLED
  comes "its nodes are not free" nodes_are idle idle
  check "$name: is requeued" is_in CANCELLED
fi

for round in $(seq "$rounds"); do
  node=n$((round % 2))
  # --- a signal ------------------------------------------------------------------------------------------------------------
  if begin "signal_$round"; then
    scontrol hold "$job" # until the test has said where the run ends
    scancel --signal=USR1 "$job"
    if comes "is not requeued" says '^slurm.sh: the ranks have saved; the job is requeued$'; then
      check "$name: has not saved" says '^asked to stop: saved in'
      end_soon
      scontrol release "$job"
      never_stopped
      check "$name: has not gone on" says '^resuming from'
    fi
  fi
  # --- a rank --------------------------------------------------------------------------------------------------------------
  if begin "rank_$round"; then
    scontrol hold "$job"
    kill -KILL "$(rank_on "$node")"
    if comes "is not requeued" says '^slurm.sh: exit code 1(37|43); retry 1 of 5; the job is requeued$'; then
      end_soon
      scontrol release "$job"
      never_stopped
      check "$name: has not gone on" says '^resuming from'
    fi
  fi
  # --- a node --------------------------------------------------------------------------------------------------------------
  if begin "node_$round"; then
    lose_node "$node"
    if comes "does not wait for a node" waits_without "$node"; then
      end_soon
      check "$name: cannot have fewer nodes" "$examples/transformer/launch/slurm.sh" fewer "$job" 1
      never_stopped
      check "$name: has other ranks" says '^2 processes \(MPI\), '
      check "$name: has not gone on" says '^resuming from'
    fi
    start_node "$node"
    comes "$node does not come back" nodes_are idle idle
  fi
done

((failures == 0)) && echo "$checks checks passed"
exit $((failures > 0))
