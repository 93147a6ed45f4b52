#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run that is resumed by its out_dir alone ends in the bytes of one that never stopped, with its own schedule, batch, data and
# strategy. A setting that is given and differs is named; so are other data, which are refused unless they are asked for.
# programs: nanogpt
# skip-sanitizers
#
#   app_resume_settings.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
export OPENBLAS_NUM_THREADS=1
odd=(--dataset=d --n_layer=1 --n_head=2 --n_embd=16 --block_size=8 --batch_size=3 --gradient_accumulation_steps=4 --dropout=0.1
  --sampling=random --seed=5 --learning_rate=0.003 --min_lr=0.0001 --warmup_iters=2 --lr_decay_iters=9 --beta2=0.9 --weight_decay=0.2
  --grad_clip=0.5 --eval_interval=100 --eval_iters=1 --log_interval=1 --strategy=shard_grad_op)
train() { patiently 120 "${launch[@]}" "$nanogpt" train "$@" >output 2>&1 || fail "train $*: ended with $?"; }
says() { check "does not say '$1'" grep -qF -- "$1" output; }
refuses() { # refuses MESSAGE SETTING...
  ends_in_error "$nanogpt" train "${@:2}"
  says "$1"
}
part() { rm -rf part && cp -r first part; }
launch=(env)
train "${odd[@]}" --ranks=2 --max_iters=8 --out_dir=whole
train "${odd[@]}" --ranks=2 --max_iters=4 --out_dir=first

# --- settings ---------------------------------------------------------------------------------------------------------------
of_run="settings of the run: eval_interval 100, eval_iters 1, dataset d, sampling random, gradient_accumulation_steps 4, batch_size 3, dropout 0.1, learning_rate 0.003, weight_decay 0.2, beta2 0.9, grad_clip 0.5, warmup_iters 2, lr_decay_iters 9, min_lr 0.0001, seed 5, strategy shard_grad_op"
for from in resume auto; do
  part
  train --ranks=2 --init_from=$from --out_dir=part --max_iters=8
  says "$of_run"
  says "resuming with max_iters 8; the run had 4"
  says ", strategy shard_grad_op, "
  check "$from: other weights than those of a run that never stopped" cmp whole/model.safetensors part/model.safetensors
done
# The run's next checkpoint has the taken settings too.
part
train --ranks=2 --init_from=resume --out_dir=part --max_iters=5
train --ranks=2 --init_from=resume --out_dir=part --max_iters=8
check "resumed twice: other weights" cmp whole/model.safetensors part/model.safetensors
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  part
  launch=(mpirun --oversubscribe --bind-to none -n 2)
  train --init_from=resume --out_dir=part --max_iters=8
  says "2 processes (MPI), strategy shard_grad_op, "
  check "mpirun: other weights" cmp whole/model.safetensors part/model.safetensors
  # Shard groups follow the machines of each start, here parts of one.
  launch=(env FSDP_RANKS_PER_NODE=2 mpirun --oversubscribe --bind-to none -n 4)
  train "${odd[@]}" --strategy=hybrid_shard --max_iters=1 --out_dir=machines
  says "in shard groups of 2, a machine each, strategy hybrid_shard"
  launch[1]=FSDP_RANKS_PER_NODE=1
  train --init_from=resume --out_dir=machines --max_iters=2
  says "in shard groups of 1, a machine each, strategy hybrid_shard"
  launch=(env)
fi
# All of the run's: there is nothing left to train.
part
train --init_from=resume --out_dir=part
says "nothing to do: the run is at iteration 5, and max_iters is 4"
check "says that settings differ, and none was given" test "$(grep -c 'the run had' output)" -eq 0
# A config file gives settings as the command line does.
echo "learning_rate = 0.0003" >config
train config --ranks=2 --init_from=resume --out_dir=part --max_iters=8 --strategy=shard_grad_op
check "does not name what differs, or more" diff - <(grep 'the run had' output) <<'LINES'
resuming with learning_rate 0.0003; the run had 0.003
resuming with max_iters 8; the run had 4
LINES
check "another learning rate changes nothing" test "$(cmp -s whole/model.safetensors part/model.safetensors; echo $?)" -eq 1
part
train --ranks=3 --init_from=resume --out_dir=part --max_iters=8
says "note: gradient_accumulation_steps 4 is not a multiple of the 3 ranks: each rank makes 2 micro-steps, and in the last one 2 of the ranks have no sequences"

# --- data -------------------------------------------------------------------------------------------------------------------
differs="data are not those of the run in 'first/step-5': it had"
cp -r data/d kept && rm -r data/d && cp -r kept data/d # the same, written later
part
train --ranks=2 --init_from=resume --out_dir=part --max_iters=8
check "the same data count as others" test "$(grep -c 'data are not those' output)" -eq 0
check "moved data: other weights" cmp whole/model.safetensors part/model.safetensors
dd if=kept/train.bin of=data/d/train.bin bs=2 skip=1 count=1 conv=notrunc 2>/dev/null # the second token is the first too
for ranks in 1 2; do refuses "the training $differs " --ranks=$ranks --init_from=auto --out_dir=first; done
says "now there are as many, with other contents. Restore the old data, or name the data with which to continue: --dataset=NAME, --train_data=FILES"
head -c 2 kept/train.bin >>data/d/train.bin
refuses "the training $differs $(($(stat -c %s kept/train.bin) / 2)) tokens in 1 file, now there are $(($(stat -c %s kept/train.bin) / 2 + 1)) tokens in 1 file" \
  --init_from=resume --out_dir=first
part
train --dataset=d --init_from=resume --out_dir=part --max_iters=5
says "warning: the training data are not those of the run in 'part/step-5'"
train --init_from=resume --out_dir=part --max_iters=6 # they are now
check "data that were asked for count as others" test "$(grep -c 'data are not those' output)" -eq 0
cp kept/train.bin data/d
head -c 2 kept/val.bin >>data/d/val.bin
refuses "the validation $differs " --init_from=resume --out_dir=first
part
train --val_data=data/d/val.bin --init_from=resume --out_dir=part --max_iters=5
says "warning: the validation data are not those"

# A checkpoint's weights are read as before.
patiently 60 "$nanogpt" sample --out_dir=part --checkpoint=latest --num_samples=1 --max_new_tokens=5 >output 2>&1 || fail "sample"
patiently 60 "$nanogpt" export --out_dir=part --checkpoint=latest --to=exported --format=nanogpt >output 2>&1 || fail "export"

echo "$checks checks, $failures failures"
((failures == 0))
