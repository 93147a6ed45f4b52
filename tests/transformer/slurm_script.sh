#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# When the scripts for Slurm requeue a job and when they end it, with stubs for srun and scontrol. tests/slurm.sh runs them
# under Slurm.
# skip-sanitizers
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../examples" && pwd)
enter /bin/bash

mkdir bin
# scontrol describes the job by the words in the file `job`, and notes what else it is asked for.
cat > bin/scontrol << 'END'
#!/bin/bash
if [[ "$*" == "show job --oneliner "* ]]; then cat job
elif [[ "$*" == "show job "* ]]; then tr ' ' '\n' < job | sed 's/^/   /'
else echo "scontrol $*" >> calls
fi
END
# srun runs the task of rank 0 here, unless the file `lost` says that nothing can be launched.
cat > bin/srun << 'END'
#!/bin/bash
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
echo "srun ${options[*]}" >> calls
if [[ -e lost ]]; then exit 0; fi
SLURM_PROCID=0 "$@"
code=$?
echo "task $code" >> calls
exit $code
END
# The trainer notes its arguments, and ends with the code in the file `code`. SIGUSR1 comes to all processes of a task.
cat > bin/trainer << 'END'
#!/bin/bash
echo "$*" > arguments
code=$(< code)
case $code in
  85) kill -USR1 $PPID ;;
  137) kill -KILL $$ ;;
  143) kill -TERM $$ ;;
esac
exit "$code"
END
chmod +x bin/*
export PATH=$PWD/bin:$PATH SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=8 NANOGPT=trainer LLAMA=trainer OUT=out
unset SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE RETRIES EXAMPLES
describe() { echo "JobId=7 JobState=$1 NumNodes=2 NumCPUs=16 NumTasks=4 CPUs/Task=3 Command=$examples/nanogpt/deploy/train.sbatch" > job; }
describe RUNNING

# ends CODE REQUEUED [COMMAND...]: the script (by default train.sbatch) must end so, with the trainer's code in `code`.
ends() {
  local expected=$1 requeued=$2 ended
  shift 2
  if (($# == 0)); then set -- bash "$examples/nanogpt/deploy/train.sbatch" limit --threads=1; fi
  : > calls
  "$@" > output 2>&1
  ended=$?
  check "the trainer ends with $(< code): expected $expected, got $ended" test "$ended" = "$expected"
  check "the trainer ends with $(< code): requeues" test "$(grep -c '^scontrol requeue 7$' calls)" = "$requeued"
}

for code in 0 1 2 134; do
  echo $code > code
  ends $code 0
  check "notes stay" test -z "$(find out -name '.slurm-*')"
done
check "the ranks" grep -qxF -- "srun --mpi=pmix --kill-on-bad-exit=1 --nodes=2 --ntasks=4" calls
check "the arguments" test "$(< arguments)" = "train limit --threads=1 --out_dir=out --init_from=auto"
SLURM_CPUS_PER_TASK=3 SLURM_GPUS_ON_NODE=2 ends 134 0
check "the options" grep -q -- " --ntasks=4 --cpus-per-task=3 --gpu-bind=none$" calls

for code in 70 75 137 143; do
  rm -rf out
  echo $code > code
  ends $code 1
  check "does not count retries" grep -q "exit code $code; retry 1 of 5; the job is requeued" output
done
# RETRIES failures in a row; a stop by signal begins anew, as often as it comes.
rm -rf out
export RETRIES=2
echo 75 > code
ends 75 1
ends 75 1
echo 85 > code
ends 85 1
ends 85 1
check "does not say why" grep -q "^slurm.sh: the ranks have saved; the job is requeued$" output
check "srun would kill ranks that still end" grep -qx "task 0" calls
echo 70 > code
ends 70 1
ends 70 1
ends 70 0
check "does not say that it gives up" grep -q "exit code 70; the job has been retried 2 times in a row (RETRIES=2) and ends" output
unset RETRIES
# srun returns 0 for a step that was never launched.
echo 85 > code
ends 85 1
echo 0 > code
touch lost
ends 75 1
check "takes a lost step for a run that has ended" grep -q "srun returned 0, but rank 0 has not ended: exit code 75; retry 1 of 5" output
rm lost
ends 0 0
# scancel ends the ranks too.
describe CANCELLED
for code in 85 143; do
  echo $code > code
  ends $code 0
done
check "does not say why" grep -q "the job is CANCELLED and is not requeued" output

# Fewer nodes: tasks and CPUs in proportion.
describe PENDING
fewer() { "$examples/transformer/launch/slurm.sh" fewer 7 "$1" > output 2>&1; }
: > calls
check "fewer nodes" fewer 1
check "fewer nodes: the update" grep -qxF "scontrol update jobid=7 NumNodes=1 NumTasks=2 NumCPUs=6" calls
for nodes in 0 2 x ''; do
  : > calls
  fewer "$nodes" && fail "took '$nodes' nodes"
  check "'$nodes' nodes" grep -qF "job 7 has 4 tasks on 2 nodes: expected fewer nodes with as many tasks each, got '$nodes'" output
  check "'$nodes' nodes: an update" test ! -s calls
done
echo > job
fewer 1 && fail "took a job that is not known"
check "an unknown job" grep -q "does not say how many nodes and tasks job 7 has" output
"$examples/transformer/launch/slurm.sh" > output 2>&1 && fail "took no arguments"
check "prints no help" grep -q "slurm.sh fewer JOB NODES" output

# llama's script divides a batch.
echo 0 > code
echo "JobId=7 JobState=RUNNING NumTasks=2 Command=$examples/llama/deploy/finetune.sbatch --max_iters=9" > job
export MODEL=model DATASET=d TOTAL_BATCH_SIZE=16
ends 0 0 bash "$examples/llama/deploy/finetune.sbatch" --max_iters=9
check "llama's arguments" test "$(< arguments)" = \
  "train --model=model --dataset=d --out_dir=out --init_from=auto --gradient_accumulation_steps=4 --batch_size=4 --max_iters=9"
TOTAL_BATCH_SIZE=10 ends 2 0 bash "$examples/llama/deploy/finetune.sbatch"
check "llama's batch" grep -q "expected a multiple of BATCH_SIZE_PER_DEVICE (4), got 10" output
unset SLURM_JOB_ID
for script in nanogpt/deploy/train llama/deploy/finetune; do
  bash "$examples/$script.sbatch" > output 2>&1 && fail "$script ran without Slurm"
  check "$script without Slurm" grep -q "SLURM_JOB_ID: is set by Slurm: submit this script with sbatch" output
done

((failures == 0)) && echo "$checks checks passed"
exit $((failures > 0))
