#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands in for a trainer in peers.sh: speaks the protocol of `nanogpt bench --pieces`, by a clock that it makes up.

Its name, that of the file it is started as, says how it behaves; the variables <NAME>_* say so too:
  SECONDS  of a step; all stubs drift alike from piece to piece, and differ by 1 % at random
  DIE      ends after so many pieces, by code 7 or, if negative, by SIGKILL
  HANG     answers no more after so many pieces
  KILL     ends the other side by SIGKILL after so many pieces
  SHAPE    parameters that it says it has
  TYPE     bits of the element type that it says it computes in
  VERSION  what it says to --version
  THREADS  that it says a rank of it has
It also starts a process that counts while it may run, and says if that of the other side counted in a piece of its own.
"""
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

name = pathlib.Path(sys.argv[0]).name
folder = pathlib.Path(os.environ["STUBS"])


def of(key, otherwise):
    return type(otherwise)(os.environ.get(f"{name.upper()}_{key}", otherwise))


def note(*words):
    with open(folder / "notes", "a") as file:
        print(name, *words, file=file)


def count():
    while True:  # until it is ended
        with open(folder / f"{name}.count", "a") as file:
            file.write(".")
        time.sleep(0.001)


def counted(other):
    file = folder / f"{other}.count"
    return file.stat().st_size if file.exists() else 0


def main():
    if sys.argv[1:] == ["--version"]:
        print(of("VERSION", "stub 1.0"))
        return 0
    if sys.argv[1:] == ["count"]:
        count()
        return 0
    subprocess.Popen([sys.executable, sys.argv[0], "count"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    note("cores", sorted(os.sched_getaffinity(0)))
    note("threads", os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"])
    while not counted(name):
        time.sleep(0.001)
    print("some words that are no part of the protocol")
    print(json.dumps(dict(kind="ready", ranks=1, parameters=of("SHAPE", 1000), tokens_per_step=64,
                          dtype=f"float{of('TYPE', 32)}", threads=of("THREADS", 1))), flush=True)
    draw, other, pieces = random.Random(name), "theirs" if name == "ours" else "ours", 0
    for line in sys.stdin:
        steps = int(line)
        note("piece", steps)
        if pieces == abs(of("DIE", 99)):
            print("out of luck", file=sys.stderr, flush=True)
            if of("DIE", 99) < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return 7
        if pieces == of("HANG", 99):
            time.sleep(600)
        if pieces == of("KILL", 99):
            os.kill(int((folder / f"{other}.pid").read_text()), signal.SIGKILL)
        before = counted(other)
        time.sleep(0.02)
        if counted(other) != before:
            note("the other side ran in the meantime")
        drift = 2 + math.sin(1.3 * pieces)  # from 1 to 3
        seconds = steps * of("SECONDS", 0.01) * drift * draw.uniform(0.99, 1.01)
        pieces += 1
        print(json.dumps(dict(kind="piece", steps=steps, seconds=seconds, loss=4.0)), flush=True)
    return 0


sys.exit(main())
