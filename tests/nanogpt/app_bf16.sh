#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt in bf16 on the host: it trains alike under every strategy and launcher, resumes to the bit, and learns as in fp32.
# Where the processor or the build cannot, it says so and computes in fp32. --dtype=fastest takes the type that the rates which
# it prints speak for, the same on all ranks; a run goes on in its type. No speed is judged.
# programs: nanogpt
# skip-sanitizers
#
#   app_bf16.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
small=(--dataset=d --n_layer=3 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4 --gradient_accumulation_steps=2
  --max_iters=40 --eval_interval=20 --eval_iters=1 --log_interval=1 --warmup_iters=5 --learning_rate=1e-3)
run() { # run FOLDER SETTING...: its losses, a line each
  local folder=$1
  shift
  patiently 120 "${launch[@]}" "$nanogpt" train "${small[@]}" --out_dir="$folder" "$@" >output 2>&1 || fail "$*: ended with $?"
  grep -oE '^iter [0-9]+: loss [0-9.]+' output >"$folder.losses"
}
launch=(env)

# --- where there are no units ------------------------------------------------------------------------------------------------
run wide --ranks=2 --dtype=float32
check "says its type" grep -qF ', dtype float32,' output
launch=(env ONEDNN_MAX_CPU_ISA=AVX2)
run without --ranks=2 --dtype=bfloat16
check "does not say that it computes in float32" grep -qE '^note: .*bf16.*; this run computes in float32$' output
check "does not compute in float32" grep -qF ', dtype float32,' output
check "other weights than with --dtype=float32" cmp wide/model.safetensors without/model.safetensors
run unmeasured --ranks=2 --dtype=fastest
check "does not say why it computes in float32" grep -qE '^note: this run computes in float32: this (processor|program) .*bf16' output
check "fastest without units: other weights than with --dtype=float32" cmp wide/model.safetensors unmeasured/model.safetensors
launch=(env)
check "an export in 'fastest'" test "$("$nanogpt" export --out_dir=wide --to=there --dtype=fastest 2>&1)" = \
  "nanogpt: error: setting 'dtype': expected float32 or bfloat16 for an export, got fastest"
"$nanogpt" --version >version
if ! grep -qE '^bf16 on cpu: A' version; then
  grep '^bf16 on cpu' version
  echo "skipped: bf16 itself; $checks checks of what is said instead"
  exit $((failures > 0))
fi

# --- where there are ---------------------------------------------------------------------------------------------------------
FSDP_PEAK_TFLOPS= run narrow --ranks=2 --dtype=bfloat16 --threads=1
check "says its type" grep -qF ', dtype bfloat16,' output
check "says what multiplies" grep -qE '^products by oneDNN, 1 thread a rank; measured bf16 product peak: ' output
check "40 steps" test "$(wc -l <narrow.losses)" -eq 41
check "bf16 changes nothing" test "$(cmp -s wide/model.safetensors narrow/model.safetensors; echo $?)" -eq 1
check "losses are not within 1 % of those in fp32" awk '
  NR == FNR { wide[$2] = $4; next }
  { seen++; if ($4 < 0.99 * wide[$2] || $4 > 1.01 * wide[$2]) exit 1 }
  END { exit seen != 41 }' wide.losses narrow.losses
for strategy in shard_grad_op no_shard; do
  run "$strategy" --ranks=2 --dtype=bfloat16 --strategy=$strategy
  check "$strategy: other weights than full_shard's" cmp narrow/model.safetensors "$strategy/model.safetensors"
done
run threads --ranks=2 --dtype=bfloat16 --threads=3
check "3 threads a rank: other weights than one's" cmp narrow/model.safetensors threads/model.safetensors
# chosen FOLDER: the type is what the rates that were printed speak for, or float32 where other work disturbed them; the weights
# are those of that type
chosen() {
  local note type ratio bf16 fp32
  if grep -qF 'note: this run computes in float32: other work on the machine disturbed the measurement' output; then
    type=float32
  else
    note=$(sed -nE 's/^note: this run computes in (float32|bfloat16): matrix products in bfloat16 are ([0-9.]+) times as fast as in float32 here \(([0-9]+) against ([0-9]+) GFLOP\/s per rank\)(, measured now|, as stored in .*)$/\1 \2 \3 \4/p' output)
    read -r type ratio bf16 fp32 <<<"$note"
    check "$1: no rates are printed" test -n "$fp32"
    check "$1: $type by $ratio, $bf16 against $fp32" awk "BEGIN { exit !(\"$type\" == \"bfloat16\" ? $ratio >= 1.25 : $ratio <= 1.25) }"
  fi
  check "$1: computes in another type" grep -qF ", dtype $type," output
  check "$1: other weights than with --dtype=$type" cmp "$([[ $type == bfloat16 ]] && echo narrow || echo wide)/model.safetensors" "$1/model.safetensors"
}
run fastest --ranks=2 --dtype=fastest --threads=1
chosen fastest
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  launch=(mpirun --oversubscribe --bind-to none -n 2)
  run processes --dtype=bfloat16
  check "processes: other weights than threads'" cmp narrow/model.safetensors processes/model.safetensors
  run fastest_processes --dtype=fastest
  chosen fastest_processes
  # A machine without units among others: nobody computes in bf16.
  cat >last_without <<'SH'
#!/bin/sh
if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ]; then export ONEDNN_MAX_CPU_ISA=AVX2; fi
exec "$@"
SH
  chmod 755 last_without
  launch+=(./last_without)
  run mixed --dtype=fastest
  check "does not name the rank without units" grep -qE '^note: this run computes in float32: rank 1: this processor has no bf16 instructions' output
  check "mixed processors: other weights than with --dtype=float32" cmp wide/model.safetensors mixed/model.safetensors
  launch=(env)
fi
# A run goes on in its type, unless another is asked for or there are no units for it.
so_far="the run in 'half' has computed in"
run half --ranks=2 --dtype=bfloat16 --max_iters=20 --lr_decay_iters=40
for type in '' fastest; do
  rm -rf copy && cp -r half copy
  run copy --ranks=2 ${type:+--dtype=$type} --max_iters=22 --lr_decay_iters=40 --init_from=resume
  check "dtype '$type': not in the type of its run" grep -qF ', dtype bfloat16,' output
  check "dtype '$type': does not say why it computes in bfloat16" grep -qxF "note: this run computes in bfloat16, as the run in 'copy' has done so far" output
done
cp -r half other
run half --ranks=2 --max_iters=40 --lr_decay_iters=40 --init_from=resume
mv half resumed
launch=(env ONEDNN_MAX_CPU_ISA=AVX2)
for setting in --dtype=float32 --seed=1337; do
  rm -rf half && cp -r other half
  run half --ranks=2 "$setting" --max_iters=22 --lr_decay_iters=40 --init_from=resume
  check "$setting: not in float32" grep -qF ', dtype float32,' output
  check "$setting: does not say that the type changes" grep -qE "^note: (.*; )?$so_far bfloat16 so far, and continues in float32$" output
done
launch=(env)
run whole --ranks=2 --dtype=bfloat16 --max_iters=40 --lr_decay_iters=40
check "resumed: other weights" cmp whole/model.safetensors resumed/model.safetensors
patiently 60 "$nanogpt" sample --out_dir=narrow --dtype=bfloat16 --num_samples=1 --max_new_tokens=40 >output 2>&1 || fail "sample"
((failures == 0)) && echo "bf16 on the host; $checks checks"
exit $((failures > 0))
