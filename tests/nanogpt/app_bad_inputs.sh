#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bad input ends nanogpt with its message and a non-zero code, before any training and without a hang: plain, as threads,
# and under mpirun, where one rank prints one line. What each setting refuses is tested by app_settings, app_data and
# app_launch.
# programs: nanogpt
# skip-tsan
#
#   app_bad_inputs.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
export OPENBLAS_NUM_THREADS=1

# refuses MESSAGE COMMAND...: the command must end by itself, not with 0, and say MESSAGE (a fixed text).
refuses() {
  local message=$1
  shift
  ends_in_error "$@"
  grep -qF -- "$message" output || fail "did not say '$message': $*"
  if grep -qE '^(iter|step) [0-9]' output; then fail "trained: $*"; fi
}

# --- data -----------------------------------------------------------------------------------------------------------------
mkdir -p data/good data/bad
for i in $(seq 1 300); do echo "the quick brown fox $i"; done > text
"$nanogpt" prepare --dataset=good --data=text > output 2>&1 || fail "prepare of a good text"
dataset() { # dataset NAME: a copy of the good one, to be damaged
  rm -rf "data/$1"
  cp -r data/good "data/$1"
}
dataset odd && printf 'x' >> data/odd/train.bin
dataset empty && : > data/empty/val.bin
dataset missing && rm data/missing/val.bin
dataset alien && printf '\377\377' >> data/alien/train.bin
dataset nonsense && echo 'no json' > data/nonsense/meta.json
dataset header && printf '\210\330\064\001\002\0\0\0' > data/header/train.bin && head -c 2000 /dev/zero >> data/header/train.bin
dataset short && head -c 20 data/good/val.bin > data/short/val.bin
printf 'abc\xff\n' > latin
: > nothing

small=(--dataset=good --n_layer=1 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=2 --max_iters=1
       --eval_iters=1 --out_dir=out --overwrite --threads=1)

refuses "setting 'dataset': expected the name of the data set to write (--dataset=NAME, for the folder data/NAME), got nothing" \
  "$nanogpt" prepare --data=text
refuses "'no_such_file' cannot be opened" "$nanogpt" prepare --dataset=x --data=no_such_file
refuses "byte 3 (0xff)" "$nanogpt" prepare --dataset=x --data=latin
refuses "is empty" "$nanogpt" prepare --dataset=x --data=nothing
refuses "'text': expected a JSON object" "$nanogpt" prepare --dataset=x --data=text --tokenizer=gpt2 --encoder_json=text --vocab_bpe=text
[[ ! -e data/x ]] || fail "a failed prepare left data/x"
mkdir docs
refuses "expected files *.txt, *.jsonl or *.ndjson" "$nanogpt" prepare --dataset=x --data=docs
echo '{"txt": 1}' > docs/x.jsonl
refuses "docs/x.jsonl', line 1: the object has no key \"text\"; its keys are: \"txt\"" "$nanogpt" prepare --dataset=x --data=docs
refuses "Usage: nanogpt COMMAND" "$nanogpt"
"$nanogpt" >output 2>/dev/null
check "nanogpt alone is an error of usage" test $? = 2
check "whose help is no result" test ! -s output
check "help that was asked for" test "$("$nanogpt" --help)" = "$("$nanogpt" 2>&1)"
check "a command's help has groups" grep -qx 'Optimizer:' <("$nanogpt" train --help)
refuses "frobnicate" "$nanogpt" frobnicate
for words in --foo "--foo train" "-x train" "--out_dir=x train"; do
  # shellcheck disable=SC2086  # two words
  refuses "unknown option '${words% train}' (see nanogpt --help); settings come after a subcommand (prepare, train," "$nanogpt" $words
done
refuses "'foo': expected a setting of 'train' (see nanogpt train --help), got '--foo'" "$nanogpt" train --foo
refuses "'lora_ranks': expected a setting of 'train' (see nanogpt train --help), got '--lora_ranks=4'; is '--lora_rank' meant?" \
  "$nanogpt" train --lora_ranks=4
refuses "setting 'lora_rank': expected a whole number of at least 0 and at most 65536, got 'x'" "$nanogpt" train --lora_r=x
for word in --lora_r= --lora_r; do
  refuses "setting 'lora_r': expected a whole number of at least 0 and at most 65536, got nothing" "$nanogpt" train $word
done

# --- settings: one on the command line, in a file, and of several that do not fit together ------------------------------------
# error_line MESSAGE COMMAND...: exit code 2, and MESSAGE is in the only line about an error
error_line() {
  checks=$((checks + 1))
  patiently 60 "${@:2}" >output 2>&1
  local code=$?
  ((code == 2)) || fail "ended with $code: ${*:2}"
  [[ $(grep 'nanogpt: error:' output) == "nanogpt: error: "*"$1"* && $(grep -c 'nanogpt: error:' output) -eq 1 ]] ||
    fail "did not say '$1' once: ${*:2}"
}
error_line "setting 'learning_rate': expected" "$nanogpt" train "${small[@]}" --learning_rate=nan
error_line "no_such_setting" "$nanogpt" train "${small[@]}" --no_such_setting=1
refuses "no_such_config" "$nanogpt" train no_such_config "${small[@]}"
echo 'n_layer = many' > wrong.conf
error_line "setting 'n_layer': expected" "$nanogpt" train wrong.conf "${small[@]}"
error_line "setting 'recompute_segment': --wrap=model has all layers in one unit: expected 1, got 2" "$nanogpt" train "${small[@]}" \
  --n_layer=4 --activation_checkpointing=true --recompute_segment=2 --wrap=model
error_line "expected at most the 1 layers, got 2" "$nanogpt" train "${small[@]}" --activation_checkpointing=2
refuses "setting 'dtype': float16 needs loss scaling" "$nanogpt" train "${small[@]}" --dtype=float16 --device=cpu
export HF_HUB_CACHE=$PWD/no_cache
for from in gpt2 some/folder text; do
  refuses "setting 'init_from': " "$nanogpt" train "${small[@]}" "--init_from=$from"
done

# --- what needs the ranks: plain, as threads, under mpirun ------------------------------------------------------------------
all_worlds() { # all_worlds MESSAGE SETTINGS...
  refuses "$1" "$nanogpt" train "${small[@]}" "${@:2}"
  error_line "$1" "$nanogpt" train "${small[@]}" "${@:2}" --ranks=2
  if [[ -n ${mpirun[*]-} ]]; then error_line "$1" "${mpirun[@]}" "$nanogpt" train "${small[@]}" "${@:2}"; fi
}
mpirun=()
if command -v mpirun > /dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  mpirun=(mpirun --oversubscribe --bind-to none -np 2)
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
else
  echo "note: without mpirun, or a program without MPI"
fi

alone() { refuses "$1" "$nanogpt" train "${small[@]}" "${@:2}"; }
alone "no folder 'data/nowhere'" --dataset=nowhere
alone "'data/odd/train.bin' has 12765 bytes, which is not a multiple of 2" --dataset=odd
alone "'data/empty/val.bin' is empty" --dataset=empty
alone "'data/missing/val.bin' is missing" --dataset=missing
check "bench reads no validation data" "$nanogpt" bench --dataset=missing "${small[@]:1:6}" --burn_in=1 --timed=1 --threads=1 >output 2>&1
alone "expected a JSON object" --dataset=nonsense
alone "header 20240520 in version 2" --dataset=header
alone "setting 'block_size': 16 is too long for 'data/short/val.bin': expected a file with 17 or more tokens, got 10" --dataset=short --block_size=16
all_worlds "has token 65535 at position" --dataset=alien
alone "setting 'shard_group'" --strategy=hybrid_shard --shard_group=3
error_line "setting 'shard_group'" "$nanogpt" train "${small[@]}" --strategy=hybrid_shard --shard_group=3 --ranks=2
: > a_file
all_worlds "setting 'out_dir'" --out_dir=a_file
alone "setting 'out_dir'" --out_dir=/proc/nanogpt
alone "setting 'log_json'" --log_json=no/such/folder/log
refuses "setting 'comm': mpi connects processes; start them with mpirun" "$nanogpt" train "${small[@]}" --device=cpu --comm=mpi
refuses "setting 'comm': nccl connects GPUs" "$nanogpt" train "${small[@]}" --device=cpu --comm=nccl

# --- launchers: which of them, and whether they know each other -------------------------------------------------------------
named() { env "RANK=$1" "WORLD_SIZE=$2" LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 "${@:3}"; }
export -f named
train=("$nanogpt" train "${small[@]}" --device=cpu)
refuses "RANK and WORLD_SIZE say rank 1 of 2, which works with --device=cuda only; on the host use mpirun, or --ranks=N" \
  bash -c 'named 1 2 "$@"' named "${train[@]}"
refuses "WORLD_SIZE is not set" env RANK=0 "${train[@]}"
refuses "WORLD_SIZE='two': expected" bash -c 'named 0 two "$@"' named "${train[@]}"
patiently 60 bash -c 'named 0 1 "$@"' named "${train[@]}" --out_dir=alone > output 2>&1 || fail "one rank of torchrun: $(tail -n 3 output)"
grep -q '^one process, ' output || fail "one rank of torchrun is not one process"
# A step of srun with several tasks that have no PMI, and a batch script, which is no task.
refuses "$([[ -n ${mpirun[*]-} ]] && echo "started by srun without MPI: this process is task 0 of 2" || echo "built without MPI")" \
  env SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 "${train[@]}"
patiently 60 env SLURM_PROCID=0 SLURM_NTASKS=2 "${train[@]}" --out_dir=alone > output 2>&1 || fail "a batch script: $(tail -n 3 output)"
if [[ -n ${mpirun[*]-} ]]; then
  launched=(env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2)
  refuses "setting 'ranks'" "${launched[@]}" "${train[@]}" --ranks=2
  refuses "but mpirun says rank" "${launched[@]}" RANK=0 WORLD_SIZE=3 "${train[@]}"
  refuses "mpirun has started 2 processes, but MPI finds 1" env PMI_RANK=0 PMI_SIZE=2 "${train[@]}"
  patiently 60 env FSDP_RANKS_PER_NODE=1 "${mpirun[@]}" "${train[@]}" --out_dir=alone --strategy=hybrid_shard --comm=mpi > output 2>&1 ||
    fail "on two machines: $(tail -n 3 output)"
  grep -q '^2 processes (MPI) in shard groups of 1, a machine each, ' output || fail "machines are no shard groups"
fi
rm -rf alone

# --- sample -----------------------------------------------------------------------------------------------------------------
refuses "has no trained model" "$nanogpt" sample --out_dir=nowhere
"$nanogpt" train "${small[@]}" > output 2>&1 || fail "a good run"
refuses "is not one of the" "$nanogpt" sample --out_dir=out --start=§
refuses "cannot be read" "$nanogpt" sample --out_dir=out --start=FILE:none
refuses "setting 'start': expected a text that is not empty" "$nanogpt" sample --out_dir=out --start=
refuses "setting 'stop_at_end': the vocabulary has no <|endoftext|>" "$nanogpt" sample --out_dir=out --stop_at_end=true
refuses "expected best, latest or the folder of a checkpoint" "$nanogpt" sample --out_dir=out --checkpoint=none
refuses "'nowhere/latest' does not exist" "$nanogpt" sample --out_dir=nowhere --checkpoint=latest
refuses "setting 'shard_group'" "$nanogpt" sample --out_dir=out --strategy=hybrid_shard
refuses "the weights of gpt2 were not found in any of" "$nanogpt" sample --out_dir=out --init_from=gpt2
refuses "setting 'init_from': expected resume" "$nanogpt" sample --out_dir=out --init_from=scratch
cp -r out damaged && head -c 1000 out/model.safetensors > damaged/model.safetensors
refuses "damaged/model.safetensors" "$nanogpt" sample --out_dir=damaged
cp -r out other && sed -i 's/"n_embd": 16/"n_embd": 32/2; s/"n_layer": 1/"n_layer": 2/' other/config.json
refuses "other/model.safetensors" "$nanogpt" sample --out_dir=other
rm -r other && cp -r out other && rm other/meta.json
refuses "vocabulary" "$nanogpt" sample --out_dir=other

# --- a file that becomes shorter while it is read -----------------------------------------------------------------------------
dataset cut
start "$nanogpt" train "${small[@]}" --dataset=cut --out_dir=cut --max_iters=100000000
wait_for grep -q '^iter 1:' output
: > data/cut/train.bin
wait "$run"
[[ $? -eq 1 ]] || fail "data that were cut: not 1"
grep -q 'become shorter while it was read' output || fail "data that were cut: $(tail -n 3 output)"

# --- names that would control the terminal -----------------------------------------------------------------------------------
evil=$'a\e]0;title\a\e[2J\rb'
refuses 'a\x1b]0;title\x07\x1b[2J\x0db' "$nanogpt" train "$evil"
check "a message has control characters" test "$(LC_ALL=C grep -c $'[\x01-\x08\x0b-\x1f\x7f]' output)" = 0
patiently 60 "$nanogpt" train "${small[@]}" "--out_dir=$evil" >output 2>&1 || fail "a folder with control characters"
check "what training prints has control characters" test "$(LC_ALL=C grep -c $'[\x01-\x08\x0b-\x1f\x7f]' output)" = 0

echo "$checks checks, $failures failures"
((failures == 0))
