#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares nanogpt's training speed on the host with PyTorch's and llm.c's, on this machine.

    pip install torch
    python3 benchmarks/peers/compare.py --model=124m --pairing=sharded

Both sides are started once, on the same cores, with as many threads, the same model, batch, token file and optimizer. Then
they take turns: pieces of about a second, at least one step, of one side while the other is stopped (SIGSTOP) with all
its processes; who begins alternates from pair to pair. A pair gives a ratio of tokens per second; the result is their
median with a bootstrap interval of 95 %. docs/performance.md explains the output.

--model, --pairing and --peers take lists (a,b); every combination is compared, one after another.
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import data
import host
import llmc
import paired
import report
import settings
from settings import MODELS, PAIRINGS, PEERS, PYTORCH, STRATEGIES
from side import Launch, PeersError, Side

HERE = pathlib.Path(__file__).resolve().parent


def ranks_launcher(args, path, ranks):
    """The words before nanogpt, and its settings, that start its ranks: processes where it knows MPI, else threads."""
    if ranks == 1:
        return [], []
    mpirun = args.mpirun or "mpirun"
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    if mpirun == "none" or "MPI: not built in" in version or not shutil.which(mpirun):
        if args.mpirun not in (None, "none"):
            raise PeersError(f"--mpirun: '{path}' was built without MPI; 'none' lets ranks be threads")
        return [], [f"--ranks={ranks}"]
    maker = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    flags = ["--oversubscribe", "--bind-to", "none"] if re.search("open.?mpi|openrte|prte", maker, re.IGNORECASE) else []
    return [mpirun, "-n", str(ranks), *flags], []


def common_environment(args):
    threads = {name: str(args.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**threads, **host.blas_environment()}


def nanogpt_launch(args, name, path, shape, pairing, ranks, cores, folder):
    before, more = ranks_launcher(args, path, ranks)
    sizes = [f"--{key}={value}" for key, value in shape.items() if key != "vocab_size"]  # that is the data's
    command = [*before, os.path.abspath(path), "bench", "--pieces=true", "--device=cpu", f"--dtype={args.dtype}", f"--dataset={data.NAME}", *sizes,
               "--dropout=0", f"--strategy={STRATEGIES[pairing]}", f"--gradient_accumulation_steps={ranks}",
               f"--burn_in={args.burn_in}", "--collective_timeout=86400", *more, *shlex.split(args.settings)]
    environment = common_environment(args)
    if os.geteuid() == 0:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return Launch(name, command, environment, folder, cores)


def pytorch_launch(args, variant, shape, pairing, ranks, cores, folder):
    command = [args.python, str(HERE / "pytorch_peer.py"), *(f"--{key}={value}" for key, value in shape.items()),
               f"--data={data.tokens_file(folder)}", f"--pairing={pairing}", f"--variant={variant}", f"--dtype={args.dtype}",
               f"--ranks={ranks}", f"--threads={args.threads}", f"--burn_in={args.burn_in}"]
    # The ranks of one machine find each other whatever its name resolves to.
    return Launch("pytorch", command, {"GLOO_SOCKET_IFNAME": "lo", **common_environment(args)}, folder, cores)


def launches(args, model, pairing, peer, folder):
    """@return how both sides are started"""
    shape = dict(MODELS[model])
    if peer == "llmc":
        shape.update(batch_size=args.llmc_batch, block_size=args.llmc_block)
    ranks = settings.ranks_of(args, pairing)
    cores = settings.cores_for(args, ranks)
    ours = nanogpt_launch(args, "nanogpt", args.ours, shape, pairing, ranks, cores, folder)
    if peer == "other":
        return ours, nanogpt_launch(args, "other", args.theirs, shape, pairing, ranks, cores, folder)
    if peer == "llmc":
        program = os.path.abspath(args.llmc)
        ours.command.append("--bias=true")  # as llm.c's model has them
        return ours, Launch("llm.c", [program], common_environment(args), os.path.dirname(program), cores)
    return ours, pytorch_launch(args, peer, shape, pairing, ranks, cores, folder)


def start(launch, args, folder, sides):
    side = Side(launch, folder)
    sides.append(side)
    ready = side.wait_ready(args.start_seconds)
    side.pause()
    return side, ready


def compare(args, ours, theirs, folder):
    """In turns. @return the result"""
    sides = []
    try:
        first, said = start(ours, args, folder, sides)
        second, answered = start(theirs, args, folder, sides)
        paired.check_same_work(said, answered)
        rounds, while_waiting = paired.take_turns(first, second, args.pairs, args.piece_seconds, args.answer_seconds,
                                                  report.progress(args, said))
        result = paired.paired_result(rounds, said["tokens_per_step"], len(ours.cores), while_waiting)
        for side, key, ready in ((first, "ours", said), (second, "theirs", answered)):
            result[key].update(name=side.name, ready=ready, memory_bytes=side.memory(), said=side.said)
        return result
    finally:
        for side in sides:
            side.end()


def compare_llmc(args, ours, theirs, folder):
    """llm.c cannot be told to pause at a step: half of our pieces come before it, half after. @return the result"""
    side = Side(ours, folder)
    try:
        ready = side.wait_ready(args.start_seconds)
        side.pause()
        steps = paired.steps_of_a_piece(side, args.piece_seconds, args.answer_seconds)
        half = max(1, args.pairs // 2)
        pieces = [side.piece(steps, args.answer_seconds) for _ in range(half)]
        text = llmc.run(theirs, max(2, args.pairs), args.start_seconds)
        seconds = llmc.step_seconds(text)
        llmc.check_same_model(text, ready["parameters"], args.llmc_block, MODELS["124m"]["n_embd"])
        pieces += [side.piece(steps, args.answer_seconds) for _ in range(half)]
        result = paired.unpaired_result(pieces, seconds, ready, args.llmc_batch * args.llmc_block, len(ours.cores))
        result["ours"].update(name=side.name, ready=ready, memory_bytes=side.memory(), said=side.said)
        return result
    finally:
        side.end()


def run_all(args, wanted):
    """Compares one after another; what fails does not keep the rest from being compared."""
    results = []
    for model, pairing, peer in wanted:
        head = {"model": model, "pairing": pairing, "peer": peer}
        if peer in PYTORCH:
            head["dtype"] = args.dtype
        report.title(head, PAIRINGS, PEERS)
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            data.write(folder, MODELS[model]["vocab_size"], args.data)
            ours, theirs = launches(args, model, pairing, peer, folder)
            head["sides"] = [report.side_facts(launch) for launch in (ours, theirs)]
            report.sides(head["sides"])
            if args.dry_run:
                continue
            try:
                head.update((compare_llmc if peer == "llmc" else compare)(args, ours, theirs, folder))
                report.result(head)
            except PeersError as error:
                head["error"] = str(error)
                print(f"  error: {error}", flush=True)
        results.append(head)
    return results


def main():
    args = settings.arguments(__doc__)
    for which in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(which) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(which, lambda number, _: sys.exit(128 + number))  # as an exception, so that sides are ended
    try:
        if args.list:
            report.list_all(MODELS, PAIRINGS, PEERS, settings.torch_version(args.python), args)
            return 0
        peers = settings.chosen_peers(args)
        version = settings.check_here(args, peers)
        facts = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **host.describe(), "torch": version,
                 "nanogpt": report.version_of(args.ours)}
        report.host(facts)
        if args.json and not args.dry_run:
            open(args.json, "a").close()  # what cannot be written is an error before anything is measured
        results = run_all(args, settings.combinations(args, peers))
        if args.json and not args.dry_run:
            with open(args.json, "w") as file:
                json.dump({"host": facts, "comparisons": results}, file, indent=1)
        return 1 if any("error" in result for result in results) else 0
    except (PeersError, OSError) as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
