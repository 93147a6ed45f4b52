#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154  # variables of steps.sh
# SPDX-License-Identifier: Apache-2.0
# Fine-tunes a Llama from a fresh clone, and prints a sample of its text.
#
#   ./examples/llama/run.sh [--model=FOLDER] [--data FILE] [trainer settings...]
#
# Installs missing packages (Debian, Ubuntu), builds, prepares the data, trains fully sharded over two ranks (or over all
# GPUs), samples, and writes a report page. Without --model it makes a small model with random weights, small-model, in the
# folder WORK. A second run skips finished work and continues training that was stopped.
# Trainer settings override the defaults, e.g. --lora_rank=16 --max_iters=200; other settings start a new run, and the old one
# is kept.
#   --model=FOLDER   a HuggingFace folder: config.json, safetensors, tokenizer
#   --data FILE      a text, or documents in a .jsonl file (default: the works of Shakespeare)
#   --least=N, --hosts=...   as in examples/nanogpt/run.sh
#   RANKS=N     number of ranks (default 2; with several GPUs, NCCL and MPI: one process for each GPU)
#   JOBS=2      number of compilers at a time
#   WORK=DIR    folder for data and models (default: build/llama-run)
program=llama
. "$(dirname "${BASH_SOURCE[0]}")/../transformer/run_script/steps.sh"
read_arguments "$@"
model=$work/small-model small=(--batch_size=2 --block_size=256 --learning_rate=3e-3 --warmup_iters=100 --max_iters=1000 --eval_interval=250 --log_interval=10)
for i in "${!settings[@]}"; do
  if [[ ${settings[i]} == --model=* ]]; then
    model=${settings[i]#--model=} small=()
    [[ $model == /* ]] || model=$called_from/$model
    [[ -r $model/config.json ]] || die "--model: '$model' has no config.json that can be read"
    unset "settings[i]"
  fi
done
build_program
if [[ $model == "$work/small-model" && ! -e $model/model.safetensors ]]; then
  say "making a small model with random weights: $model"
  "$repository/examples/llama/formats/write_small_model.sh" "$model"
fi
prepare_text "_$(cat "$model"/tokenizer.* | sha256sum | cut -c1-8)" --model="$model" # a tokenizer has token files of its own
train --model="$model" ${small[@]+"${small[@]}"}
show_results The --start=The --max_new_tokens=250
