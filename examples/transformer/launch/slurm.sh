#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A trainer as a job of Slurm (22.05 or newer, with its plugin pmix). Sourced by train.sbatch and finetune.sbatch:
#
#   ranks=$(ranks_of_job)               the job's tasks; one is one rank
#   run_ranks OUT PROGRAM ARGUMENT...   runs them, then requeues the job or ends it; does not return
#
# Run as a program, it lets a job go on with fewer nodes, after one was lost and Slurm has requeued the job:
#
#   slurm.sh fewer JOB NODES
#
# run_ranks requeues a job whose ranks have saved and stopped (SIGUSR1: exit code 85) as often as that happens, and a job
# that has failed in a way that a restart may mend, RETRIES times (default 5) in a row: exit codes 70, 75, 137 and 143 (a
# rank was lost or killed), and a step of which a part was never launched. Any other exit code ends the job.
#
# In OUT are the job's notes: .slurm-JOB.retries, and .slurm-JOB.ended, which rank 0 writes when its program has ended.

say_of_job() { echo "slurm.sh: $*" >&2; }

# field_of_job JOB NAME: what scontrol says of it.
field_of_job() { scontrol show job --oneliner "$1" | tr ' ' '\n' | sed -n "s|^$2=||p" | head -n 1; }

# SLURM_NTASKS is what the job was submitted with, also after `fewer`.
ranks_of_job() { field_of_job "${SLURM_JOB_ID:?is set by Slurm: submit the script with sbatch}" NumTasks; }

# A rank. Slurm signals every process of a task; this shell waits for the program, which saves. srun kills the others when
# one ends with another code than 0: what is as it should be ends with 0, and rank 0's own code is in a file.
rank_of_job='
trap : INT TERM USR1
ended=$1
shift
"$@"
code=$?
if ((SLURM_PROCID == 0)); then echo "$code" > "$ended"; fi
exit $((code == 85 ? 0 : code))'

run_ranks() {
  local out=$1 notes code lost='' options=()
  shift
  notes=$out/.slurm-$SLURM_JOB_ID
  mkdir -p "$out" && rm -f "$notes.ended" || exit 2
  if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
  # Every rank sees all GPUs of its node and takes its own.
  if [[ -n ${SLURM_GPUS_ON_NODE-} ]]; then options+=(--gpu-bind=none); fi
  srun --mpi=pmix --kill-on-bad-exit=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$(ranks_of_job)" ${options[@]+"${options[@]}"} \
    bash -c "$rank_of_job" rank "$notes.ended" "$@"
  code=$?
  if ((code == 0)); then
    code=75 lost="srun returned 0, but rank 0 has not ended: "
    if [[ -s $notes.ended ]]; then code=$(< "$notes.ended") lost=''; fi
  fi
  case $code in
    85)
      rm -f "$notes.retries"
      requeue "the ranks have saved"
      ;;
    70 | 75 | 137 | 143) retry "${lost}exit code $code" ;;
    *) rm -f "$notes.ended" "$notes.retries" ;;
  esac
  exit "$code"
}

retry() { # retry WHY
  local made=0 most=${RETRIES:-5}
  if [[ -s $notes.retries ]]; then made=$(< "$notes.retries"); fi
  if ((made >= most)); then
    say_of_job "$1; the job has been retried $made times in a row (RETRIES=$most) and ends"
    return
  fi
  echo $((made + 1)) > "$notes.retries"
  requeue "$1; retry $((made + 1)) of $most"
}

requeue() { # requeue WHY
  local state
  state=$(field_of_job "$SLURM_JOB_ID" JobState)
  if [[ $state != RUNNING ]]; then # by scancel, for example
    say_of_job "$1; the job is $state and is not requeued"
    return
  fi
  say_of_job "$1; the job is requeued"
  scontrol requeue "$SLURM_JOB_ID"
}

# fewer JOB NODES: changes a pending job's nodes, and its tasks and CPUs in proportion.
fewer() {
  local job=$1 nodes=$2 had tasks cpus
  had=$(field_of_job "$job" NumNodes) had=${had%%-*}
  tasks=$(field_of_job "$job" NumTasks) cpus=$(field_of_job "$job" CPUs/Task)
  if [[ ! $had$tasks$cpus =~ ^[0-9]+$ ]]; then
    say_of_job "scontrol does not say how many nodes and tasks job $job has"
    return 2
  fi
  if [[ ! $nodes =~ ^[1-9][0-9]*$ ]] || ((nodes >= had || tasks % had != 0)); then
    say_of_job "job $job has $tasks tasks on $had nodes: expected fewer nodes with as many tasks each, got '$nodes'"
    return 2
  fi
  tasks=$((tasks * nodes / had))
  scontrol update jobid="$job" NumNodes="$nodes" NumTasks="$tasks" NumCPUs=$((tasks * cpus))
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  if [[ $# != 3 || $1 != fewer ]]; then
    sed -n '3,16s/^# \{0,1\}//p' "$0"
    exit 2
  fi
  fewer "$2" "$3"
fi
