#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# llama's CUDA program on stand-ins fine-tunes as it does on the host: all weights, frozen layers and adapters; threads and
# processes over NCCL, in fp32 and bf16; and writes the same text.
# programs: llama llama_write_folder
# labels: standin
# timeout: 600
#
#   llama.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

llama=$1/examples/llama/llama
enter "$llama"
"$1/tests/llama_write_folder" random model >output 2>&1 || fail "write_folder"
for i in $(seq 40); do echo "{\"text\": \"$(printf 'move %.0s' $(seq $((i % 5 + 1))))$i\"}"; done >texts.jsonl
"$llama" prepare --model=model --dataset=d --data=texts.jsonl >output 2>&1 || fail "prepare"
export FSDP_STANDIN_DEVICES=4 OPENBLAS_NUM_THREADS=1
small=(--model=model --dataset=d --block_size=8 --batch_size=2 --gradient_accumulation_steps=2 --max_iters=3 --eval_interval=100
       --eval_iters=1 --log_interval=1 --learning_rate=0.001)
train() { # train LAUNCH FILE ARGUMENT...: the losses go to FILE
  local launch=$1 file=$2
  rm -f "$file"
  # shellcheck disable=SC2086
  patiently 300 $launch "$llama" train "${small[@]}" "--log_json=$file" "--out_dir=$file.out" --overwrite "${@:3}" >output 2>&1 || fail "$launch llama train ${*:3}"
  if grep -q standin: output; then fail "a rule was broken: ${*:3}"; fi
}
losses() { sed -n 's/.*"iter": *\([0-9]*\).*"loss": *\([-+.0-9e]*\).*/\1 \2/p' "$1"; }
# close FILE FILE BOUND: four losses, relatively as close
close() {
  paste -d ' ' <(losses "$1") <(losses "$2") | awk -v bound="$3" '
    function size(x) { return x < 0 ? -x : x }
    NF != 4 || $1 != $3 || size($2 - $4) > bound * size($4) { print "differs:", $0; bad = 1 }
    END { exit bad || NR != 4 }'
}
mpirun="mpirun --oversubscribe --bind-to none -np 2"
if ((EUID == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
ranks=()
if ! command -v mpirun >/dev/null || [[ $(ldd "$llama") != *libmpi* ]]; then mpirun="" ranks=(--ranks=2); fi

for tuning in --lora_rank=0 --freeze_layers=1 --lora_rank=4; do
  train "" host --device=cpu --ranks=2 "$tuning"
  train "" gpu --device=cuda --dtype=float32 --ranks=2 "$tuning"
  check "threads, $tuning: other losses than the host's" close gpu host 1e-5
  train "$mpirun" gpu --device=cuda --dtype=bfloat16 "${ranks[@]}" "$tuning" --activation_checkpointing
  check "bf16, $tuning: other losses than the host's" close gpu host 5e-3
done
text() { patiently 60 "$llama" sample --model=model --start=abc --max_new_tokens=12 --temperature=0 --stop_at_end=false "$@" 2>output || fail "sample $*"; }
check "another greedy text than the host's" cmp <(text --device=cpu) <(text --device=cuda --dtype=float32)

echo "$checks checks, $failures failures"
((failures == 0))
