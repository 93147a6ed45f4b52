#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The training step of bench_step in PyTorch: same model, sizes, batch and flags, same figures in --json.

GPT-2 without biases and dropout, exact GELU, tied embeddings; scaled_dot_product_attention; autocast to bfloat16 over
fp32 parameters; clipping to norm 1; fused AdamW. Eager and through torch.compile.
With --attention: scaled_dot_product_attention alone, forward and backward, by every backend that it has.
"""
import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
from pytorch_gpt import Gpt, adamw  # noqa: E402  # found by the line above

MODELS = {  # layers, heads, width, sequences of a micro-step on a large GPU
    "gpt2": (12, 12, 768, 64),
    "gpt2-medium": (24, 16, 1024, 32),
    "gpt2-large": (36, 20, 1280, 16),
    "gpt2-xl": (48, 25, 1600, 16),
}
# Dense bf16 tensor-core rates in TFLOP/s, from NVIDIA's data sheets ("with sparsity" halved); the first that fits.
PEAKS = (("H200 NVL", 835.5), ("H200", 989.4), ("H100 NVL", 835.5), ("H100 PCIe", 756.5), ("H100", 989.4), ("A100", 312.0))


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


class Clock:
    """Times between marks: events on CUDA, the wall clock elsewhere."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin, end):
        return begin.elapsed_time(end) * 1e-3 if self.cuda else end - begin


def measured_product(args, device):
    """FLOP per second of a large matrix product in the step's type."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=getattr(torch, args.dtype))
    clock, times = Clock(device), []
    for _ in range(8):
        clock.wait()
        begin = clock.mark()
        a @ a.t()
        end = clock.mark()
        clock.wait()
        times.append(clock.seconds(begin, end))
    return 2 * n**3 / statistics.median(times[2:])


def peak(args, device, name):
    """Reference of MFU in FLOP per second, and its source, as in bench_step."""
    if args.peak > 0:
        return args.peak * 1e12, "given"
    if args.dtype == "bfloat16" and device.type == "cuda":
        for word, tflops in PEAKS:
            if word in name:
                return tflops * 1e12, "data sheet, dense bf16"
    return measured_product(args, device), "measured"


def run_step(args, device, head, variant):
    torch.manual_seed(1337)
    torch._dynamo.reset()
    with torch.device(device):
        model = Gpt(args.n_layer, args.n_head, args.n_embd, args.block, args.vocab_size)
        ids = torch.randint(args.vocab_size, (4, 2, args.batch, args.block))
    optimizer = adamw(model, 6e-5, fused=device.type == "cuda")
    call = torch.compile(model) if variant == "compiled" else model
    narrow = args.dtype == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16) if narrow else contextlib.nullcontext()
    losses, turn = torch.zeros((), device=device), 0

    def step():
        nonlocal turn
        for _ in range(args.accumulate):
            inputs, targets = ids[turn % 4]
            turn += 1
            with autocast:
                loss = call(inputs, targets) / args.accumulate
            loss.backward()
            losses.add_(loss.detach())
        if args.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    clock = Clock(device)
    for _ in range(args.burn_in):
        step()
    clock.wait()
    losses.zero_()
    begin, marks = time.perf_counter(), [clock.mark()]
    for _ in range(args.timed):
        step()
        marks.append(clock.mark())
    clock.wait()
    seconds = (time.perf_counter() - begin) / args.timed
    tokens = args.batch * args.block * args.accumulate
    count = sum(p.numel() for p in model.parameters())
    flop = tokens * (6 * (count - args.block * args.n_embd) + 12 * args.n_layer * args.n_embd * args.block)
    flops, source = head["peak_flops_per_s"], head["peak_source"]
    figures = dict(head, mode="step", variant=variant, parameters=count, time_ms=seconds * 1e3)
    figures["median_ms"] = statistics.median(clock.seconds(a, b) for a, b in zip(marks, marks[1:])) * 1e3
    figures.update(tokens_per_s=tokens / seconds, mfu=flop / seconds / flops, loss=losses.item() / args.timed)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures.update(account_bytes=torch.cuda.max_memory_allocated(), peak_bytes=total - free)
    print(f"{args.model} {variant}: time per step {figures['time_ms']:.4f} ms (median {figures['median_ms']:.4f}), "
          f"tokens/s {figures['tokens_per_s']:.1f}, MFU {figures['mfu'] * 100:.2f}% of {flops * 1e-12:.2f} TFLOP/s ({source}), "
          f"peak {figures.get('peak_bytes', 0) * 1e-9:.3f} GB, loss {figures['loss']:.4f}", flush=True)
    return figures


def run_attention(args, device, head):
    """One layer's attention at the model's batch and heads, on views of packed queries, keys and values."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    clock, rows = Clock(device), []
    dtype = getattr(torch, args.dtype)
    size = args.n_embd // args.n_head
    packed = torch.randn(args.batch, args.block, 3, args.n_head, size, device=device, dtype=dtype)
    inputs = [packed[:, :, i].transpose(1, 2).detach().requires_grad_() for i in range(3)]
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 32 << 20
    filler = torch.randn(2 * cache // 4, device=device)
    product = 2 * args.batch * args.n_embd * args.block * (args.block + 1) / 2  # FLOP, under the causal mask

    def cold(call):
        times = []
        for i in range(args.repeats + 2):
            clock.wait()
            for _ in range(4):  # keeps the device busy until `call` is enqueued
                filler.sum()
            begin = clock.mark()
            call()
            end = clock.mark()
            clock.wait()
            if i >= 2:
                times.append(clock.seconds(begin, end))
        return statistics.median(times)

    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        def forward():
            return F.scaled_dot_product_attention(*inputs, is_causal=True)

        row = {"backend": backend.lower()}
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                row["forward_us"] = cold(forward) * 1e6
                result = forward()
                slope = torch.randn_like(result)
                row["backward_us"] = cold(lambda: torch.autograd.grad(result, inputs, slope, retain_graph=True)) * 1e6
            row.update(forward_tflops=2 * product / row["forward_us"] * 1e-6, backward_tflops=5 * product / row["backward_us"] * 1e-6)
            print(f"{row['backend']:<20} forward {row['forward_us']:>10.2f} us {row['forward_tflops']:>8.2f} TFLOP/s   "
                  f"backward {row['backward_us']:>10.2f} us {row['backward_tflops']:>8.2f} TFLOP/s", flush=True)
        except RuntimeError as error:  # this backend cannot
            row["error"] = first_line(error)
            print(f"{row['backend']:<20} not available: {row['error']}", flush=True)
        rows.append(row)
    return dict(head, mode="attention", rows=rows)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    for name in ("n_layer", "n_head", "n_embd", "batch"):
        parser.add_argument(f"--{name}", type=int, default=0, help="0: the model's")
    for name, value in (("vocab_size", 50304), ("block", 1024), ("accumulate", 1), ("burn_in", 10), ("timed", 20), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--peak", type=float, default=0.0, help="reference of MFU in TFLOP/s; 0: data sheet, else measured")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variant", choices=("eager", "compiled", "both"), default="both")
    parser.add_argument("--attention", action="store_true", help="measure attention instead of a step")
    parser.add_argument("--json", default="", help="file that gets a line of JSON for each variant")
    args = parser.parse_args()
    layers, heads, width, batch = MODELS[args.model]
    args.n_layer, args.n_head, args.n_embd = args.n_layer or layers, args.n_head or heads, args.n_embd or width
    args.batch = args.batch or (batch if args.device == "cuda" else 1)
    return args


def main():
    args = arguments()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    head = {"framework": "pytorch", "version": torch.__version__, "device": name,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    for key in ("model", "n_layer", "n_head", "n_embd", "batch", "block", "accumulate", "dtype"):
        head[key] = getattr(args, key)
    results, failed = [], False

    def write():  # after every variant, should time run out in the next
        if args.json:
            with open(args.json, "w") as file:
                file.writelines(json.dumps(result) + "\n" for result in results)

    if args.attention:
        results.append(run_attention(args, device, head))
        write()
        return 0
    head["peak_flops_per_s"], head["peak_source"] = peak(args, device, name)
    for variant in ("eager", "compiled") if args.variant == "both" else (args.variant,):
        try:
            results.append(run_step(args, device, head, variant))
        except Exception as error:  # a compiler that is missing, or memory: the other variant may still run
            failed = True
            results.append(dict(head, mode="step", variant=variant, error=first_line(error)))
            print(f"{args.model} {variant}: failed: {type(error).__name__}: {first_line(error)}", flush=True)
        write()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
