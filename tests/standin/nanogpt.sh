#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt's CUDA program on stand-ins learns what it learns on the host: processes over NCCL under mpirun, and threads; every
# strategy, fp32 and bf16, with state in host memory and without.
# programs: nanogpt
# labels: standin
# long
# timeout: 900
#
#   nanogpt.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
steps=${FSDP_STANDIN_STEPS:-4} # 20 show the same
for i in $(seq 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
export FSDP_STANDIN_DEVICES=4 OPENBLAS_NUM_THREADS=1
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=1 --gradient_accumulation_steps=4
       --max_iters="$((steps - 1))" --eval_interval=100 --eval_iters=1 --log_interval=1 --warmup_iters=0 --lr_decay_iters=100
       --learning_rate=0.001)
train() { # train LAUNCH FILE ARGUMENT...: the losses go to FILE
  local launch=$1 file=$2
  rm -f "$file"
  # shellcheck disable=SC2086
  patiently 300 $launch "$nanogpt" train "${small[@]}" "--log_json=$file" "--out_dir=$file.out" --overwrite "${@:3}" >output 2>&1 || fail "$launch nanogpt train ${*:3}"
  if grep -q standin: output; then fail "a rule was broken: ${*:3}"; fi
}
losses() { sed -n 's/.*"iter": *\([0-9]*\).*"loss": *\([-+.0-9e]*\).*/\1 \2/p' "$1"; }
# close FILE FILE BOUND: as many losses, relatively as close
close() {
  paste -d ' ' <(losses "$1") <(losses "$2") | awk -v bound="$3" -v want="$steps" '
    function size(x) { return x < 0 ? -x : x }
    NF != 4 || $1 != $3 || size($2 - $4) > bound * size($4) { print "differs:", $0; bad = 1 }
    END { exit bad || NR != want }'
}
mpirun="mpirun --oversubscribe --bind-to none -np 4"
if ((EUID == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
ranks=()
if ! command -v mpirun >/dev/null || [[ $(ldd "$nanogpt") != *libmpi* ]]; then mpirun="" ranks=(--ranks=4); fi

train "" host --device=cpu --ranks=4
for strategy in full_shard shard_grad_op no_shard "hybrid_shard --shard_group=2" "full_shard --reshard_after_forward=2"; do
  # shellcheck disable=SC2086
  if [[ -n $mpirun ]]; then
    train "$mpirun" gpu --device=cuda --dtype=float32 --strategy=$strategy
    check "processes, $strategy: other losses than the host's" close gpu host 1e-5
    check "not over NCCL" grep -q '^4 processes with a GPU each (NCCL' output
  fi
done
train "" gpu --device=cuda --dtype=float32 --ranks=4
check "threads: other losses than the host's" close gpu host 1e-5
train "$mpirun" gpu --device=cuda --dtype=bfloat16 "${ranks[@]}"
check "bf16: other losses than the host's" close gpu host 2e-3
train "$mpirun" offloaded --device=cuda --dtype=bfloat16 "${ranks[@]}" --offload=moments,masters,gradients
check "bf16, offloaded: other losses" cmp <(losses gpu) <(losses offloaded)
train "" gpu --device=cuda --dtype=float32
train "" offloaded --device=cuda --dtype=float32 --offload=moments,gradients
check "one rank, offloaded: other losses" close offloaded gpu 1e-5

echo "$checks checks, $failures failures"
((failures == 0))
