# SPDX-License-Identifier: Apache-2.0
"""Prints a comparison."""
import os
import shlex
import subprocess
import sys

import host as machine
from side import PeersError, listed

NOTABLE = 0.02  # shares above it are pointed out


def version_of(program):
    environment = {**os.environ, **machine.blas_environment()}
    found = subprocess.run([program, "--version"], capture_output=True, text=True, env=environment)
    if found.returncode != 0:
        raise PeersError(f"'{program} --version' ends with code {found.returncode}: {(found.stderr or found.stdout).strip()}")
    return found.stdout.strip().splitlines()


def host(facts):
    virtual = ", virtual" if facts["virtual"] else ""
    print(f"{facts['date']}  {facts['cpu']}{virtual}, {facts['cores']} cores, load {facts['load']:.2f}, {facts['system']}")
    print(f"instruction sets: {listed(facts['instruction_sets']) or 'none of note'}")
    for line in facts["nanogpt"]:
        print(f"nanogpt: {line}")
    if facts["torch"]:
        print(f"pytorch: {facts['torch']}")


def side_facts(launch):
    chosen, changed = machine.speed_variables({**os.environ, **launch.environment})
    return {"name": launch.name, "command": list(map(str, launch.command)), "folder": launch.folder, "cores": launch.cores,
            "environment": chosen, "changed": changed}


def sides(facts):
    for side in facts:
        print(f"  {side['name']} on cores {listed(side['cores'])}: {shlex.join(side['command'])}")
        words = []
        for key, value in side["environment"].items():
            note = ""
            if key in side["changed"]:
                before = side["changed"][key]
                note = " (was unset)" if before is None else f" (was {before})"
            words.append(f"{key}={value}{note}")
        print(f"    environment: {listed(words) or 'nothing that changes speed'}")


def title(head, pairings, peers):
    dtype = f" in {head['dtype']}" if "dtype" in head else ""
    pairing, peer = head["pairing"], head["peer"]
    print(f"\n{head['model']}, {pairing}: {pairings[pairing]}; {peer}: {peers[peer]}{dtype}", flush=True)


def progress(args, ready):
    """@return what is called after each pair"""

    def say(number, ours, theirs):
        if not args.verbose and not sys.stderr.isatty():
            return
        speeds = [piece.steps * ready["tokens_per_step"] / piece.seconds for piece in (ours, theirs)]
        line = f"{speeds[0]:,.1f} and {speeds[1]:,.1f} tokens/s, ratio {speeds[0] / speeds[1]:.4f}"
        to, end = (sys.stdout, "\n") if args.verbose else (sys.stderr, "\r")
        print(f"  pair {number} of {args.pairs}: {line}", file=to, end=end, flush=True)

    return say


def threads(count):
    return f"{count} thread{'s' * (count != 1)} a rank"


def configuration(ready):
    """The settings in a side's first line, as a text."""
    if "torch" in ready:
        return listed([f"torch {ready['torch']}", f"{ready['dtype']}{' autocast' * (ready['dtype'] != 'float32')}",
                       threads(ready['threads']), f"AdamW {ready['adamw']}",
                       f"oneDNN {'on' if ready['mkldnn'] else 'off'}", f"MKL {'on' if ready['mkl'] else 'off'}",
                       f"kernels for {ready['capability']}"])
    known = {key: ready.get(key, "?") for key in ("dtype", "threads", "strategy")}
    blas = [f"OpenBLAS core {ready['blas_core']}"] if "blas_core" in ready else []
    return listed([known["dtype"], threads(known["threads"]), f"strategy {known['strategy']}", *blas])


def result(found):
    ours, theirs = found["ours"], found["theirs"]
    ready = ours["ready"]
    print(f"  {ready['tokens_per_step']:,} tokens a step, {ready['parameters']:,} parameters")
    for side in (ours, theirs):
        pieces = len(side.get("pieces", side.get("seconds", [])))
        detail = "" if "ready" not in side else f", {configuration(side['ready'])}"
        memory = f", {side['memory_bytes'] / 1e9:.3f} GB (PSS)" if side.get("memory_bytes") else ""
        steps = side["steps_of_a_piece"]
        print(f"  {side['name']:<8} {side['tokens_per_s']:>12,.1f} tokens/s (median of {pieces} pieces of {steps} "
              f"step{'s' * (steps > 1)}; {side['lowest']:,.1f} to {side['highest']:,.1f}){memory}{detail}")
    low, high = found["interval"]
    paired = "median of paired ratios" if "ratios" in found else "ratio of medians, not taken in turns"
    print(f"  {ours['name']} / {theirs['name']}: {found['ratio']:.4f}, 95 % interval {low:.4f} to {high:.4f} ({paired})")
    for line in remarks(found):
        print(f"  {line}")
    sys.stdout.flush()


def remarks(found):
    """Warnings about disturbances and differences that make the figures less reliable."""
    for side in (found["ours"], found["theirs"]):
        if "pieces" not in side:
            continue
        if side["others"] > NOTABLE:
            yield f"note: during {side['name']}'s pieces others had {side['others']:.0%} of the cores (median)"
        if side["stolen"] > NOTABLE:
            yield f"note: during {side['name']}'s pieces the machine below had {side['stolen']:.0%} of the cores (median)"
        if abs(side["uncounted"]) > NOTABLE:
            yield f"note: {side['name']}'s own clock leaves out {side['uncounted']:.0%} of the time that its pieces took"
    idle = found.get("cpu_seconds_while_waiting", 0)
    if idle > 0.05:
        yield f"note: sides have computed for {idle:.2f} s in all while they should have been stopped"


def list_all(models, pairings, peers, torch, args):
    print("models:")
    for name, shape in models.items():
        print(f"  {name:<11} " + listed(f"{key} {value}" for key, value in shape.items()))
    for what, table in (("pairings", pairings), ("peers", peers)):
        print(f"{what}:")
        for name, text in table.items():
            print(f"  {name:<11} {text}")
    print("here:")
    print(f"  nanogpt     {args.ours}{'' if os.path.isfile(args.ours) else ': not there'}")
    print(f"  torch       {torch or f'not there ({args.python})'}")
    print(f"  cores       {listed(sorted(os.sched_getaffinity(0)))}")
