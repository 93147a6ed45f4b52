#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154  # variables of steps.sh
# SPDX-License-Identifier: Apache-2.0
# Trains a small character-level GPT from a fresh clone, and prints a sample of its text.
#
#   ./examples/nanogpt/run.sh [--data FILE] [--least=N [--hosts=a:2,b:2]] [trainer settings...]
#
# Installs missing packages (Debian, Ubuntu), builds, prepares the data, trains fully sharded over two ranks (or over all
# GPUs), samples, and writes a report page.
# A second run skips finished work and continues training that was stopped. Trainer settings override the defaults, e.g.
# --max_iters=500 --strategy=ddp; other settings start a new run, and the old one is kept.
#   --least=N   if ranks are lost, goes on from the last checkpoint with the remaining ones, N or more (see go_on.sh):
#               RANKS=4 ./examples/nanogpt/run.sh --least=2
#   --hosts=... trains on these machines, with the given number of ranks on each; all have this folder and WORK at the same path
#   RANKS=N     number of ranks (default 2; with several GPUs, NCCL and MPI: one process for each GPU)
#   JOBS=2      number of compilers at a time
#   WORK=DIR    folder for data and models (default: build/nanogpt-run)
program=nanogpt
. "$(dirname "${BASH_SOURCE[0]}")/../transformer/run_script/steps.sh"
read_arguments "$@"
build_program
prepare_text ''
# Half of the iterations of the config at three times its rate: a validation loss of 1.95 instead of 1.90 (2026-11-28).
train train_shakespeare_char_cpu --batch_size=6 --learning_rate=3e-3 --max_iters=1000 --lr_decay_iters=1000
show_results The --num_samples=1 --max_new_tokens=500
