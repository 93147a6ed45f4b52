#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt trains under every strategy that it names, to the same losses, and samples the same text with each, on any ranks,
# from whole weights and from checkpoints. With gradients summed in bf16 it trains alike under every strategy too, close to fp32.
# programs: nanogpt
# skip-sanitizers
#
#   app_strategies.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
small=(--dataset=d --ranks=4 --n_layer=4 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --max_iters=6 --eval_interval=3 --eval_iters=1)

runs=() # a folder of each
losses() { # losses NAME [SETTING...]: of a run that says that its strategy is NAME
  local name=$1 run=run${#runs[@]}
  shift
  runs+=("$run")
  patiently 120 "$nanogpt" train "${small[@]}" --out_dir="$run" --log_json="$run.json" "$@" >output 2>&1 ||
    { fail "$* ended with $?"; cat output; return; }
  grep -qF "strategy $name," output || fail "$*: does not say that it is $name"
  grep -oE '^(iter|step) [0-9]+.*loss [0-9.]+' output | sed 's/,* time.*//' >"$run.losses"
  [[ -s $run.losses ]] || fail "$*: no losses"
  diff run0.losses "$run.losses" || fail "$*: other losses than full_shard's"
}
memory() { grep -o '"mem_bytes":[0-9]*' "$1.json" | tail -n 1 | cut -d: -f2; }

losses full_shard
losses full_shard --wrap=size --min_params=3500 # two layers of 3,104 parameters
losses full_shard --wrap=model
for i in 1 2; do
  (($(memory "run$i") > $(memory "run$((i - 1))"))) || fail "larger units take no more memory: $(memory "run$i") bytes"
done
losses full_shard --reshard_after_forward=2
losses shard_grad_op --strategy=full_shard --reshard_after_forward=false
losses 'hybrid_shard(full_shard)' --strategy=hybrid_shard --shard_group=2
losses 'hybrid_shard(shard_grad_op)' --strategy=hybrid_shard --shard_group=2 --reshard_after_forward=false
losses no_shard --strategy=ddp

# --- gradients summed in bf16 ----------------------------------------------------------------------------------------------------
# narrow NAME SETTING...: 25 steps, a loss a line
narrow() {
  local run=$1
  shift
  patiently 120 "$nanogpt" train "${small[@]}" --max_iters=25 --log_interval=1 --warmup_iters=5 --out_dir="$run" "$@" >output 2>&1 ||
    fail "$*: ended with $?"
  grep -oE '^iter [0-9]+: loss [0-9.]+' output >"$run.losses"
  check "$*: 26 losses" test "$(wc -l <"$run.losses")" -eq 26
}
narrow wide
check "says what gradients are summed in" grep -q ', gradients summed in float32$' output
narrow narrow --reduce_dtype=bfloat16
check "says what gradients are summed in" grep -q ', gradients summed in bfloat16$' output
check "the log's program says it too" grep -q 'reduce-scatter transformer.h.1 in bf16' narrow/log.jsonl
check "bf16 sums change nothing" test "$(cmp -s wide/model.safetensors narrow/model.safetensors; echo $?)" -eq 1
check "losses are not within 1 % of those in fp32" awk '
  NR == FNR { wide[$2] = $4; next }
  { seen++; if ($4 < 0.99 * wide[$2] || $4 > 1.01 * wide[$2]) exit 1 }
  END { exit seen != 26 }' wide.losses narrow.losses
for strategy in shard_grad_op no_shard; do
  narrow "narrow_$strategy" --reduce_dtype=bfloat16 --strategy=$strategy --bucket_mb=0.01
  check "$strategy: other weights than full_shard's" cmp narrow/model.safetensors "narrow_$strategy/model.safetensors"
done
narrow narrow_hybrid --reduce_dtype=bfloat16 --strategy=hybrid_shard --shard_group=2

# --- samples: three blocks long, of a model with some character --------------------------------------------------------------
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=model --max_iters=60 --learning_rate=1e-2 --warmup_iters=5 >output 2>&1 || fail "train"
mpi=()
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then mpi=(mpirun --oversubscribe --bind-to none -n 2); fi
few=(--num_samples=2 --max_new_tokens=24)
"$nanogpt" sample --out_dir=model "${few[@]}" >text || fail "sample"
check "two samples" test "$(grep -cx -- --------------- text)" -eq 2
check "another seed, the same text" test "$(cmp -s text <("$nanogpt" sample --out_dir=model "${few[@]}" --seed=2); echo $?)" -eq 1
# the_same WHAT COMMAND...: it prints that text, and to the standard error what is in `said`.
: >said
the_same() {
  local what=$1
  shift
  patiently 60 "$@" "${few[@]}" >output 2>errors || fail "$what: ended with $?"
  check "$what: another text" cmp -s text output
  check "$what: other words" diff said errors
}
sample=("$nanogpt" sample --out_dir=model)
the_same "3 ranks" "${sample[@]}" --ranks=3
the_same "4 ranks, shard_grad_op" "${sample[@]}" --ranks=4 --strategy=shard_grad_op
the_same "4 ranks, hybrid_shard" "${sample[@]}" --ranks=4 --strategy=hybrid_shard --shard_group=2
the_same "2 ranks, no_shard" "${sample[@]}" --ranks=2 --strategy=no_shard --prefetch=0
the_same "the latest checkpoint" "${sample[@]}" --checkpoint=latest
the_same "a checkpoint in out_dir" "${sample[@]}" --ranks=3 --checkpoint="$(cat model/latest)"
the_same "a checkpoint elsewhere" "$nanogpt" sample --checkpoint="model/$(cat model/latest)/"
"$nanogpt" sample --checkpoint=best --out_dir=model "${few[@]}" >output 2>errors || fail "the best checkpoint"
check "the best checkpoint is another one" test "$(cat model/best)" != "$(cat model/latest)"
check "the best checkpoint is the latest" test "$(cmp -s text output; echo $?)" -eq 1
if ((${#mpi[@]})); then
  the_same "2 processes, the latest checkpoint" "${mpi[@]}" "${sample[@]}" --checkpoint=latest
fi
rm model/model.safetensors
echo "nanogpt: 'model/model.safetensors' does not exist; using the latest checkpoint, 'model/$(cat model/latest)'" >said
the_same "no whole weights" "${sample[@]}" --ranks=2

# At temperature 0 and with the smallest nucleus the seed means nothing.
greedy() { patiently 60 "${sample[@]}" "${few[@]}" "$@" 2>errors || fail "sample $*"; }
greedy --temperature=0 >likely
for otherwise in --temperature=0 --top_p=1e-6 --top_k=1; do
  greedy "$otherwise" --seed=2 >output
  check "not the most likely tokens: $otherwise" cmp -s likely output
done

# A run that was stopped before it had whole weights can be sampled from: what its tokens are lies there already.
start "$nanogpt" train "${small[@]}" --out_dir=stopped --max_iters=1000000 --eval_interval=1000000 --log_interval=1
wait_for grep -q '^iter 3:' output
kill -USR1 $run
wait $run
check "asked to stop, it ended with $?" test $? -eq 85
check "there are whole weights" test ! -e stopped/model.safetensors
patiently 60 "$nanogpt" sample --out_dir=stopped "${few[@]}" >output 2>&1 || fail "sample from a run that was stopped"

# Nobody reads any more: the end, at once and without a word. A full disk is an error.
endless=("${sample[@]}" --checkpoint=latest --num_samples=1000000 --max_new_tokens=1000000)
closed() { # closed COMMAND...
  patiently 60 "$@" 2>errors | head -c 30 >output
  check "a closed pipe: ended with ${PIPESTATUS[0]}: $*" test "${PIPESTATUS[0]}" -eq 0
  check "a closed pipe: not silent: $*" test ! -s errors
  check "what was read before: $*" test "$(stat -c %s output)" -eq 30
}
closed "${endless[@]}"
closed "${endless[@]}" --ranks=2
# mpirun reads what its ranks print, and ends them if its own pipe closes; so each rank gets a pipe of its own.
piped() { exec "$@" > >(head -c 30); }
export -f piped
if ((${#mpi[@]})); then closed "${mpi[@]}" bash -c 'piped "$@"' piped "${endless[@]}"; fi
if [[ -c /dev/full ]]; then
  for ranks in 1 2; do
    ends_in_error bash -c '"$@" >/dev/full' full "${endless[@]}" --ranks=$ranks
    grep -qF "standard output cannot be written: No space left on device" output || fail "a full disk: says otherwise"
  done
fi
((failures == 0)) && echo "strategies agree; $checks checks"
exit $((failures > 0))
