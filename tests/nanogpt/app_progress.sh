#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt train shows a progress bar where its lines go to a terminal, alone and below mpirun, and nowhere else.
# programs: nanogpt
# skip-tsan
#
#   app_progress.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
if ! command -v python3 >/dev/null; then echo "skipped: there is no python3, which makes terminals"; exit 77; fi
export OPENBLAS_NUM_THREADS=1
unset NANOGPT_PROGRESS
train="$nanogpt train --dataset=d --n_layer=1 --n_head=1 --n_embd=8 --block_size=8 --batch_size=1 --gradient_accumulation_steps=2"
train+=" --eval_iters=2 --eval_interval=4 --max_iters=4 --log_interval=2"
# Not script(1): that of util-linux 2.38 stops itself when the test is stopped and continued.
terminal='import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(["bash", "-c", sys.argv[1]])))'
on_terminal() { patiently 120 python3 -c "$terminal" "$1" >output 2>&1 </dev/null; }
bar='\[==*\] 100% 4/4 loss '

trains_on_a_terminal() {  # trains_on_a_terminal COMMAND...
  check "on a terminal: $1" on_terminal "$*"
  check "a bar before the first iteration: $1" grep -q $'0% 0/4\r' output
  check "a bar: $1" grep -q "$bar" output
  check "how far evaluations are: $1" grep -q '3/4 evaluating: 4 of 4 batches' output
  check "lines as well: $1" grep -q 'iter 2: loss' output
  check "one rank speaks: $1" test "$(grep -c 'iter 2: loss' output)" = 1
}
no_bar() {  # no_bar COMMAND...
  check "elsewhere: $1" patiently 120 "$@" >output 2>&1
  if grep -q $'\x1b\\|evaluating' output; then fail "a bar in a file: $1"; fi
}

trains_on_a_terminal $train --ranks=2 --out_dir=alone
no_bar $train --ranks=2 --out_dir=file
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  trains_on_a_terminal mpirun --oversubscribe --bind-to none -n 2 $train --out_dir=mpi
  no_bar mpirun --oversubscribe --bind-to none -n 2 $train --out_dir=mpifile
  check "mpirun on a terminal, into a file" on_terminal "mpirun --oversubscribe --bind-to none -n 2 $train --out_dir=mpiinto >printed 2>&1"
  if grep -q $'\x1b' printed; then fail "a bar in mpirun's file"; fi
fi
check "asked for" env NANOGPT_PROGRESS=1 $train --out_dir=asked >output 2>&1
check "a bar in a file that asks for it" grep -q "$bar" output
check "declined" on_terminal "NANOGPT_PROGRESS=0 $train --out_dir=declined"
if grep -q $'\x1b' output; then fail "a bar that was declined"; fi

echo "$checks checks, $failures failures"
((failures == 0))
