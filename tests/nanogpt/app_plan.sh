#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt plan --hardware: memory to the byte, time, the fastest options that fit, and what it refuses.
# skip-sanitizers
# programs: nanogpt
#
#   app_plan.sh BINARY_DIR
set -uo pipefail

hardware=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../examples/nanogpt/deploy/hardware" && pwd)/dgx_h100.txt
. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
export OPENBLAS_NUM_THREADS=1

refuses() { # refuses MESSAGE COMMAND...
  local message=$1
  shift
  ends_in_error "$@"
  grep -qF -- "$message" output || fail "did not say '$message': $*"
}
plan() { patiently 60 "$nanogpt" plan --hardware="$hardware" "$@"; }
says() { grep -qF -- "$1" output || fail "did not say '$1'"; }

check "gpt2" plan --gpus=512 --model=gpt2 --batch_size=8 >output 2>&1
says '512 GPUs (64 nodes of 8)'
says 'The fastest:'
says 'MFU'
grep -qE '^options: --strategy=' output || fail "no options"
total=$(sed -n 's/.*, total \([0-9]*\)$/\1/p' output)
parts=0
for part in $(sed -n 's/^memory of a GPU, bytes: \(.*\), total.*/\1/p' output | tr -dc '0-9 '); do parts=$((parts + part)); done
check "the parts add up: $parts, $total" test "$parts" = "$total"
# The options that it gives are a run of their own, of the same memory.
read -r -a options < <(sed -n 's/^options: //p' output)
check "those options alone" plan --gpus=512 --model=gpt2 --batch_size=8 "${options[@]}" >output 2>&1
says "total $total"
says '1 of 1 options fit'

# Micro-steps that the GPUs do not divide.
tokens_of() { sed -n 's/^step .* ms, \([0-9]*\) tokens: .*/\1/p' output; }
check "32 micro-steps on 16 GPUs" plan --gpus=16 --model=gpt2 --gradient_accumulation_steps=32 >output 2>&1
even=$(tokens_of)
step=$(sed -n 's/^step \([0-9.]*\) ms, .*/\1/p' output)
says '2 micro-steps of a GPU'
check "24 micro-steps on 16 GPUs" plan --gpus=16 --model=gpt2 --gradient_accumulation_steps=24 >output 2>&1
says '2 micro-steps of a GPU; 8 GPUs have no sequences in the last one'
check "three quarters of $even tokens" test $((4 * $(tokens_of))) = $((3 * even))
check "a step of $step ms" grep -q "^step $step ms" output

# Candidates of the search: groups of whole nodes, and those that divide a node; what was given is kept.
groups_of() { plan --model=2x2x64 --prefetch=1 --activation_checkpointing=false --strategy=hybrid_shard "$@" 2>&1 |
  awk '$1 == "hybrid_shard" { print $2 }' | sort -n | tr '\n' ' '; }
check "groups of 120 GPUs" test "$(groups_of --gpus=120)" = "2 4 8 24 40 "
check "groups of 8 GPUs" test "$(groups_of --gpus=8)" = "2 4 "
check "a group alone means hybrid_shard" plan --gpus=16 --model=gpt2 --shard_group=8 >output 2>&1
says '6 of 6 options fit'
check "what contradicts reshard_after_forward is left out" plan --gpus=8 --model=gpt2 --reshard_after_forward=4 >output 2>&1
grep -qE '^(shard_grad_op|no_shard)' output && fail "plans a strategy that has nothing to reshard"
check "batch sizes" plan --gpus=8 --model=gpt2 --batch_sizes=1,8 --strategy=full_shard --prefetch=1 --activation_checkpointing=false >output 2>&1
says '2 of 2 options fit'
says '--batch_size=8'

# The parts of a run on this machine are what its ranks account for.
for i in $(seq 1 300); do echo "the quick brown fox $i"; done >text
check "prepare" "$nanogpt" prepare --dataset=d --data=text >output 2>&1
rm data/d/meta.json  # the vocabulary is GPT-2's, as in a plan
tiny=(--n_layer=3 --n_head=2 --n_embd=32 --block_size=16 --batch_size=2 --dtype=float32 --device=cpu)
for options in "--strategy=full_shard --prefetch=1" "--strategy=shard_grad_op --prefetch=2" "--strategy=no_shard"; do
  read -r -a options <<<"$options"
  check "train ${options[*]}" patiently 120 "$nanogpt" train "${tiny[@]}" "${options[@]}" --dataset=d --ranks=2 --threads=1 \
    --activation_checkpointing=true --gradient_accumulation_steps=2 --max_iters=1 --eval_iters=1 --overwrite >output 2>&1
  rank=$(grep '"kind":"memory"' out/log.jsonl | tail -n1)
  accounted=$(for tag in parameters gradients optimizer gather reduce activations workspace; do
    sed -n "s/.*\[{[^}]*\"$tag\":\([0-9]*\),.*/\1/p" <<<"$rank"
  done | tr '\n' ' ')
  check "plan ${options[*]}" plan --gpus=2 "${tiny[@]}" "${options[@]}" --activation_checkpointing=true >output 2>&1
  planned=$(sed -n 's/^memory of a GPU, bytes: \(.*\), scalars.*/\1/p' output | tr -dc '0-9 \n' | tr -s ' ' ' ' | sed 's/^ //')
  check "${options[*]}: accounted $accounted, planned $planned" test "${accounted% }" = "$planned"
done

# A large model on many GPUs: memory does not grow with their number.
large=(plan --hardware="$hardware" --gpus=16384 --model=80x64x8192 --batch_size=1 --block_size=4096)
if [[ -x /usr/bin/time ]]; then
  check "large" patiently 60 /usr/bin/time -f '%M' -o peak "$nanogpt" "${large[@]}" >output 2>&1
  check "peak memory of $(tail -n1 peak) KiB" test "$(tail -n1 peak)" -lt 65536
else
  check "large" patiently 60 "$nanogpt" "${large[@]}" >output 2>&1
fi
says '16384 GPUs (2048 nodes of 8)'

# Nothing fits: what comes nearest, and what is lacking.
refuses 'comes nearest' "$nanogpt" plan --hardware="$hardware" --gpus=8 --model=80x64x8192 --block_size=4096
grep -qE '[0-9]+ bytes \([0-9.]+ GB\) are lacking' output || fail "does not say what is lacking"

refuses '20 GPUs are not a multiple of the 8 GPUs of a node' "$nanogpt" plan --hardware="$hardware" --gpus=20 --model=gpt2
refuses 'expected a divisor of the 512 ranks, got 24' "$nanogpt" plan --hardware="$hardware" --gpus=512 --model=gpt2 --strategy=hybrid_shard --shard_group=24
refuses 'LAYERSxHEADSxWIDTH' "$nanogpt" plan --hardware="$hardware" --gpus=16 --model=12x12
refuses 'LAYERSxHEADSxWIDTH' "$nanogpt" plan --hardware="$hardware" --gpus=16 --model=no_folder
# The shape has the limits of n_layer, n_head and n_embd; bytes that 64 bits cannot count are refused.
for shape in 99999999999x1x1:n_layer 1000000x1x1:n_layer 0x1x1:n_layer 2x10001x10001:n_head 300x1000x30000000:n_embd 2x1x99999999999999999999:n_embd; do
  refuses "setting '${shape#*:}': expected a whole number of at least 1 and at most" "$nanogpt" plan --hardware="$hardware" --gpus=8 --model="${shape%:*}"
done
refuses 'use a smaller n_layer or n_embd' "$nanogpt" plan --hardware="$hardware" --gpus=8 --model=10000x1x1000000
many='use a smaller batch_size, block_size, gradient_accumulation_steps, n_layer or n_embd'
refuses "$many" "$nanogpt" plan --hardware="$hardware" --gpus=8 --model=gpt2 --batch_size=1000000 --block_size=1000000
refuses "$many" "$nanogpt" plan --gpus=8 --model=gpt2 --batch_sizes=1,1000000 --block_size=1000000
# More bytes than a process has addresses.
refuses 'comes nearest' "$nanogpt" plan --hardware="$hardware" --gpus=8 --model=80x64x8192 --batch_size=1000000
grep -qE 'total [0-9]{16}$' output || fail "80x64x8192 with a batch of 1000000 has no total of petabytes"

# Folders: config.json alone is read, of HuggingFace's GPT-2 or of an out_dir.
mkdir hf llama nothing run
echo '{"model_type":"gpt2","n_layer":2,"n_head":2,"n_embd":32,"n_positions":16,"vocab_size":50257}' >hf/config.json
echo '{"model_type":"llama","hidden_size":8}' >llama/config.json
cp out/config.json run/
check "a folder of HuggingFace's" plan --gpus=8 --model=hf >output 2>&1
check "an out_dir's config.json" plan --gpus=8 --model=run >output 2>&1
refuses "setting 'model': 'llama/config.json': 'model_type': expected \"gpt2\", got \"llama\". This program plans GPT-2 models only" \
  "$nanogpt" plan --hardware="$hardware" --gpus=8 --model=llama
refuses "a folder with config.json (of a HuggingFace GPT-2, or an out_dir with weights), got 'nothing'" \
  "$nanogpt" plan --hardware="$hardware" --gpus=8 --model=nothing
refuses "model gpt2 has 12: expected nothing else, got 24" "$nanogpt" plan --hardware="$hardware" --gpus=16 --model=gpt2 --n_layer=24
refuses "setting 'gpus': expected ranks, 8, or no ranks, got 16" "$nanogpt" plan --hardware="$hardware" --gpus=16 --ranks=8
refuses 'no times for offloading' "$nanogpt" plan --hardware="$hardware" --gpus=16 --offload=moments
sed 's/^memory = .*/memory = -1/' "$hardware" >negative.txt
line=$(grep -n '^memory = ' negative.txt | cut -d: -f1)
refuses "negative.txt: line $line: 'memory': expected a number from 1 to 1e30, got '-1'" \
  "$nanogpt" plan --hardware=negative.txt --gpus=16
refuses 'nowhere.txt' "$nanogpt" plan --hardware=nowhere.txt --gpus=16

echo "$checks checks, $failures failures"
((failures == 0))
