#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# llama continues a text with the weights of llama2.c's stories260K as llama2.c does, on any ranks. Processes fine-tune it on games
# of random moves, of which it then writes others; what training needs can be planned and measured before.
# programs: llama llama_write_folder
# skip-sanitizers
#
#   app_stories.sh BINARY_DIR     (needs $FSDP_TEST_DATA with stories260K.bin and tok512.bin)
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
. "$(dirname "${BASH_SOURCE[0]}")/../support/mpirun.sh"

if [[ ! -r ${FSDP_TEST_DATA:-}/stories260K.bin || ! -r ${FSDP_TEST_DATA:-}/tok512.bin ]]; then
  echo "skipped: FSDP_TEST_DATA has no stories260K.bin and tok512.bin"
  exit 77
fi
data=$(realpath "$FSDP_TEST_DATA")
llama=$1/examples/llama/llama
enter "$llama"
export OPENBLAS_NUM_THREADS=1
"$1/tests/llama_write_folder" stories model "$data" || fail "write_folder"

# llama2.c's README has this text.
story="Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. She wanted to play with it, but it was too high."
for ranks in 1 2 3; do
  patiently 60 "$llama" sample --device=cpu --model=model --start="Once upon a time" --temperature=0 --max_new_tokens=64 --ranks=$ranks >output 2>errors ||
    fail "sample"
  check "another story on $ranks ranks" grep -qxF "$story" output
done

# --- before training -----------------------------------------------------------------------------------------------------------
mkdir described && cp model/config.json described
patiently 60 "$llama" plan --model=described --ranks=2 >output 2>errors || fail "plan"
check "a plan names the model" grep -q '^260032 parameters, 2 ranks, strategy full_shard, bfloat16 on a GPU, AdamW, sequences of 512 tokens' output
check "a plan has 6 batch sizes, twice" test "$(grep -cE '^ +(1|2|4|8|16|32) +(false|true)( +[0-9]+\.[0-9]{3}){7}$' output)" -eq 12
patiently 60 "$llama" bench --model=described --block_size=64 --batch_sizes=1,2 --activation_checkpointing=both --burn_in=1 --timed=1 --device=cpu \
  >output 2>errors || fail "bench"
check "measures each variant" test "$(grep -cE '^ +[12] +(false|true)( +[0-9.,]+){4}$' output)" -eq 4

# --- games of random moves ---------------------------------------------------------------------------------------------------
awk '
  function draw(n) { seed = seed * 16807 % 2147483647; return int(seed / 2147483647 * n) }
  function move() {
    piece = draw(8)
    return (piece < 5 ? substr("NBRQK", piece + 1, 1) (draw(5) == 0 ? "x" : "") : "") substr("abcdefgh", draw(8) + 1, 1) (draw(8) + 1)
  }
  BEGIN {
    seed = 7
    for (game = 0; game < 300; ++game) {
      text = ""
      moves = 6 + draw(8)
      for (i = 1; i <= moves; ++i) text = text (i > 1 ? " " : "") i ". " move() " " move()
      print "{\"text\": \"" text "\"}"
    }
  }' >games.jsonl
"$llama" prepare --model=model --dataset=games --data=games.jsonl >output 2>&1 || fail "prepare"
check "300 games" grep -q '^documents: 300$' output
train=(train --model=model --dataset=games --gradient_accumulation_steps=2 --batch_size=4 --block_size=128 --learning_rate=1e-3
  --dtype=float32 --device=cpu --threads=1 --max_iters=100 --eval_interval=100 --eval_iters=2 --out_dir=out)
if command -v mpirun >/dev/null && [[ $(ldd "$llama") == *libmpi* ]]; then
  patiently 280 mpirun -n 2 "$llama" "${train[@]}" >output 2>&1 || fail "train"
  check "two processes" grep -q '^2 processes (MPI), strategy full_shard' output
else
  echo "note: without mpirun, or a program without MPI: ranks are threads"
  patiently 280 "$llama" "${train[@]}" --ranks=2 >output 2>&1 || fail "train"
fi
losses=$(sed -nE 's/^step [0-9]+: train loss ([0-9.]+).*/\1/p' output)
check "games are no stories: $losses" awk 'NR == 1 { exit !($1 > 6) }' <<<"$losses"
check "learns: $losses" awk 'NR == 2 { found = $1 < 1.5 } END { exit !found }' <<<"$losses"
patiently 60 "$llama" sample --device=cpu --out_dir=out --start=1. --max_new_tokens=60 --temperature=0 >output 2>errors || fail "sample"
move='[NBRQK]?x?[a-h][1-8]'
check "writes no moves" grep -qE "^1\. $move $move [0-9]+\. $move( |\$)" output

echo "$checks checks, $failures failures"
exit $((failures > 0))
