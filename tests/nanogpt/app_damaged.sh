#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A checkpoint is damaged or missing: resume, sample and export name the others that are whole, and auto continues from the
# newest of them. No run starts from scratch beside checkpoints.
# programs: nanogpt
# timeout: 300
# skip-sanitizers
#
#   app_damaged.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
export OPENBLAS_NUM_THREADS=1
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=2
  --eval_interval=5 --eval_iters=2 --log_interval=1 --max_iters=14 --keep_last=3)
patiently 120 "$nanogpt" train "${small[@]}" --ranks=2 --out_dir=whole >output 2>&1 || fail "whole"
check "other checkpoints: $(echo whole/step-*)" test "$(echo whole/step-*)" = "whole/step-10 whole/step-15 whole/step-5"
says() { check "does not say '$1'" grep -qF -- "$1" output; }
spoil() { printf 'spoilt' | dd of="$1" bs=1 seek=10000 conv=notrunc status=none; } # among the parameters
retell() { sed -i 's/"iteration":/"iterations":/' "$1"; }
sums() { (cd "$1" && find . -type f ! -name log.jsonl -exec cksum {} + | sort -k3); }
# begin_with WHAT: `run` is a copy of the whole run in which WHAT was done
begin_with() {
  rm -rf run
  cp -a whole run
  "${@:2}"
  what=$1
}
resume() { # resume MESSAGE SETTING...: refused, nothing is changed
  sums run >before
  ends_in_error "${launcher[@]}" "$nanogpt" train "${small[@]}" --out_dir=run --init_from=resume "${@:2}"
  says "$1"
  check "$what: several ranks say so" test "$(grep -c 'nanogpt: error:' output)" -eq 1
  check "$what: the folder was changed" cmp before <(sums run)
}
continues() { # continues FROM SETTING...: from that checkpoint, to the bytes of a run that was not damaged
  patiently 120 "${launcher[@]}" "$nanogpt" train "${small[@]}" --out_dir=run "${@:2}" >output 2>&1 || fail "$what: ended with $?"
  says "resuming from run/$1 at iteration ${1#step-}"
  check "$what: other weights" cmp whole/model.safetensors run/model.safetensors
}
rank1=step-15/rank-00001-of-00002.safetensors
cut() { truncate -s -1 "$1"; }
gone() { rm -r "$@"; }

# --- resume names what is whole, auto takes it: on any number of ranks --------------------------------------------------------
launcher=()
two="Whole checkpoints in 'run': step-10, step-5. --checkpoint=step-10 loads the newest of them; --init_from=auto takes the newest"
begin_with "a damaged file" spoil "run/$rank1"
resume "'run/$rank1' is damaged: checksum mismatch" --ranks=2
says "$two"
continues step-10 --init_from=auto --ranks=2
says "note: rank"
says "; continuing from run/step-10, the newest whole checkpoint"
begin_with "a file that is cut short" cut "run/$rank1"
resume "$two" --ranks=1
continues step-10 --init_from=resume --checkpoint=step-10 --ranks=2
begin_with "a damaged description" retell run/step-15/checkpoint.json
resume "'run/step-15/checkpoint.json' is damaged: checksum mismatch. $two" --ranks=2
continues step-10 --init_from=auto --ranks=2
says "note: 'run/step-15/checkpoint.json' is damaged: checksum mismatch; continuing from run/step-10, the newest checkpoint that can be read"
begin_with "latest names a folder that is not there" gone run/step-15
resume "'run/step-15/checkpoint.json' cannot be opened: No such file or directory. $two" --ranks=2
continues step-10 --init_from=auto --ranks=2
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  launcher=(mpirun --oversubscribe --bind-to none -n 2)
  begin_with "a damaged file, processes" spoil "run/$rank1"
  resume "$two"
  continues step-10 --init_from=auto
  launcher=()
fi

# --- several are damaged ----------------------------------------------------------------------------------------------------------
two_damaged() { retell run/step-15/checkpoint.json && spoil run/step-10/rank-00000-of-00002.safetensors; }
begin_with "the two newest are damaged" two_damaged
resume "Whole checkpoints in 'run': step-5. --checkpoint=step-5 loads the newest of them" --ranks=2
continues step-5 --init_from=auto --ranks=2
all_damaged() { two_damaged && cut run/step-5/rank-00001-of-00002.safetensors; }
begin_with "all are damaged" all_damaged
resume "No other checkpoint there is whole; 'run/step-10/rank-00000-of-00002.safetensors' is damaged" --ranks=2 --checkpoint=step-15
for from in step-15 step-10; do # auto sees the first by its description, the second when it loads
  sums run >before
  ends_in_error "$nanogpt" train "${small[@]}" --out_dir=run --init_from=auto --ranks=2
  says "no checkpoint in 'run' can be loaded; "
  for checkpoint in $(cd run && echo step-*); do says "run/$checkpoint/"; done
  check "$what: the folder was changed" cmp before <(sums run)
  rm -r run/$from && echo step-10 >run/latest
done
begin_with "no description at all" gone run/latest run/step-{5,10,15}/checkpoint.json
ends_in_error "$nanogpt" train "${small[@]}" --out_dir=run --init_from=auto
says "has no file checkpoint.json"

# --- sample and export ------------------------------------------------------------------------------------------------------------
begin_with "a damaged file" spoil "run/$rank1"
rm run/model.safetensors
ends_in_error "$nanogpt" sample --out_dir=run --num_samples=1 --max_new_tokens=1
says "Whole checkpoints in 'run': step-10, step-5. --checkpoint=step-10 loads the newest of them"
ends_in_error "$nanogpt" export --out_dir=run --checkpoint=latest --to=exported
says "Whole checkpoints in 'run': step-10, step-5. --checkpoint=step-10 loads the newest of them"
patiently 60 "$nanogpt" sample --out_dir=run --checkpoint=step-10 --num_samples=1 --max_new_tokens=1 >output 2>&1 || fail "a whole one"

# --- the setting belongs to resume -------------------------------------------------------------------------------------------------
ends_in_error "$nanogpt" train "${small[@]}" --out_dir=run --init_from=auto --checkpoint=step-10
says "setting 'checkpoint': only init_from=resume takes a checkpoint, got 'step-10' with init_from=auto"

echo "$checks checks, $failures failures"
((failures == 0))
