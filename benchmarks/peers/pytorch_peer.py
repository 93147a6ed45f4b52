#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nanoGPT's training step in PyTorch on the host, some steps at a time, for compare.py.

Speaks the protocol of `nanogpt bench --pieces` (examples/transformer/run/pieces.hpp): a line of JSON when it is ready, then for each
number of steps on standard input a line with the seconds that they took. Ranks are processes, which rank 0 starts:
one alone, DistributedDataParallel, or FSDP2's fully_shard per layer, over gloo. Options that speed PyTorch up, and change
results by rounding only, are on: fused AdamW, gradients as views of DDP's buckets, losses that are read once a piece.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from pytorch_gpt import Gpt, adamw

PAIRINGS = ("1rank", "replicated", "sharded")


class Batches:
    """Windows of a file of uint16 token ids, drawn at random as nanoGPT does."""

    def __init__(self, args):
        count = os.path.getsize(args.data) // 2
        # Kept as int16: torch.from_file maps the file, and few operations know uint16.
        self.tokens = torch.from_file(args.data, shared=False, size=count, dtype=torch.int16)
        self.batch, self.block = args.batch_size, args.block_size
        self.generator = torch.Generator().manual_seed(1337 + args.rank)

    def draw(self):
        starts = torch.randint(len(self.tokens) - self.block, (self.batch,), generator=self.generator)
        rows = torch.stack([self.tokens[start : start + self.block + 1] for start in starts.tolist()])
        ids = rows.to(torch.int64) & 0xFFFF
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Trainer:
    def __init__(self, args):
        torch.manual_seed(1337)  # all ranks begin with the same weights
        model = Gpt(args.n_layer, args.n_head, args.n_embd, args.block_size, args.vocab_size)
        self.parameters = sum(p.numel() for p in model.parameters())
        compiled = args.variant == "compiled"
        if args.pairing == "sharded":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh("cpu", (args.ranks,))
            for layer in model.layers:
                if compiled:
                    layer.compile()  # what stands between FSDP's hooks
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model = self.call = model
        if args.pairing == "replicated":
            self.call = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if compiled and args.pairing != "sharded":
            self.call = torch.compile(self.call)
        self.optimizer, self.adamw = self.make_optimizer()
        self.batches = Batches(args)
        self.narrow = args.dtype == "bfloat16"
        self.loss = torch.zeros(())

    def make_optimizer(self):
        try:
            return adamw(self.model, 6e-4, fused=True), "fused"
        except RuntimeError:  # before 2.4 there was none for the host
            return adamw(self.model, 6e-4, fused=None), "not fused"

    def step(self):
        inputs, targets = self.batches.draw()
        with torch.autocast("cpu", torch.bfloat16) if self.narrow else contextlib.nullcontext():
            loss = self.call(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


def say(**line):
    print(json.dumps(line), flush=True)


def next_piece(args):
    """The steps that rank 0 reads, on every rank; 0 at the end of input."""
    steps = torch.zeros((), dtype=torch.int64)
    if args.rank == 0:
        line = sys.stdin.readline()
        steps.fill_(int(line) if line else 0)
    if args.ranks > 1:
        dist.broadcast(steps, 0)
    return int(steps)


def run(args):
    trainer = Trainer(args)

    def take(steps):
        for _ in range(steps):
            trainer.step()
        loss = trainer.loss.item()
        if args.ranks > 1:
            mean = torch.tensor(loss)
            dist.all_reduce(mean)  # all ranks are done
            loss = mean.item() / args.ranks
        return loss

    take(args.burn_in)
    if args.rank == 0:
        say(kind="ready", ranks=args.ranks, parameters=trainer.parameters, dtype=args.dtype, strategy=args.pairing,
            tokens_per_step=args.ranks * args.batch_size * args.block_size, torch=torch.__version__,
            threads=torch.get_num_threads(), adamw=trainer.adamw, mkldnn=torch.backends.mkldnn.is_available(),
            mkl=torch.backends.mkl.is_available(), capability=torch.backends.cpu.get_cpu_capability())
    while steps := next_piece(args):
        begin = time.perf_counter()
        loss = take(steps)
        if args.rank == 0:
            say(kind="piece", steps=steps, seconds=time.perf_counter() - begin, loss=loss)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--data", required=True, help="file of uint16 token ids")
    parser.add_argument("--pairing", choices=PAIRINGS, default="1rank")
    parser.add_argument("--variant", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="number of threads of a rank")
    parser.add_argument("--burn_in", type=int, default=3)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)  # the file by which ranks find each other
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    with contextlib.ExitStack() as ending:
        if args.ranks > 1 and not args.meeting:
            args.meeting = str(pathlib.Path(ending.enter_context(tempfile.TemporaryDirectory())) / "meeting")
            for rank in range(1, args.ranks):
                command = [sys.executable, *sys.argv, f"--rank={rank}", f"--meeting={args.meeting}"]
                ending.callback(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).wait)
        if args.ranks > 1:
            # Ranks are stopped between pieces for as long as the other side takes.
            dist.init_process_group("gloo", init_method=f"file://{args.meeting}", rank=args.rank, world_size=args.ranks,
                                    timeout=datetime.timedelta(days=1))
            ending.callback(dist.destroy_process_group)
        run(args)


if __name__ == "__main__":
    main()
