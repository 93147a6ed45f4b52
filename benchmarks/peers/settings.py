# SPDX-License-Identifier: Apache-2.0
"""Command line of compare.py, and its checks before anything is started."""
import argparse
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

from side import PeersError, listed

HERE = pathlib.Path(__file__).resolve().parent
MODELS = {  # layers, heads, width, block, sequences of a rank's step, vocabulary
    "124m": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=1, vocab_size=50304),
    "char": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=12, vocab_size=65),
    "tiny": dict(n_layer=2, n_head=2, n_embd=64, block_size=32, batch_size=2, vocab_size=65),
}
PAIRINGS = {
    "1rank": "one rank on each side",
    "replicated": "nanogpt's no_shard beside DistributedDataParallel",
    "sharded": "nanogpt's full_shard beside FSDP2's fully_shard, a unit for each layer",
}
STRATEGIES = {"1rank": "no_shard", "replicated": "no_shard", "sharded": "full_shard"}
PYTORCH = {"eager", "compiled"}  # peers
LLMC_TRAINS = ("124m", "1rank")
PEERS = {
    "eager": "PyTorch as it is",
    "compiled": "PyTorch through torch.compile (needs a C++ compiler)",
    "llmc": "llm.c's train_gpt2, which --llmc names: 124m on one rank, in two stretches and not in turns",
    "other": "the program that --theirs names",
}


def one_of(names, what):
    def read(text):
        chosen = text.split(",")
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"expected {what} out of {', '.join(names)}, got '{name}'")
        return chosen

    return read


def core_list(text):
    """0,2-3 as [0, 2, 3]"""
    cores = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise argparse.ArgumentTypeError(f"expected cores like 0,2-3, got '{text}'")
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    return sorted(set(cores))


def above_zero(kind):
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
        return value

    return read


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, seconds = above_zero(int), above_zero(float)
    add = parser.add_argument
    add("--ours", metavar="PATH", default=str(HERE.parents[1] / "build/cpu/examples/nanogpt/nanogpt"),
        help="nanogpt (default: as the preset cpu builds it)")
    add("--model", type=one_of(MODELS, "models"), default=["124m"],
        help="124m (GPT-2, block 1024, batch 1), char (6/6/384, block 256, batch 12), tiny (for trials)")
    add("--pairing", type=one_of(PAIRINGS, "pairings"), default=["1rank"], help="1rank, replicated, sharded")
    add("--peers", type=one_of(PEERS, "peers"), help="eager, compiled, llmc (default: eager,compiled, and llmc with --llmc)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="element type of both sides; PyTorch's bfloat16 is autocast over fp32 weights")
    add("--ranks", type=count, default=2, help="number of ranks of replicated and sharded")
    add("--threads", type=count, default=1, help="number of threads of each rank")
    add("--cores", type=core_list, metavar="LIST",
        help="cores for both sides, e.g. 0,2-3; their number must be ranks times threads (default: the first ones)")
    add("--pairs", type=count, default=20)
    add("--piece-seconds", type=seconds, default=1.0)
    add("--burn-in", type=count, default=3, help="steps before the first piece")
    add("--data", metavar="FILE", help="file of uint16 token ids, e.g. a train.bin (default: random ids)")
    add("--settings", default="", help="more settings for nanogpt in one string, e.g. '--prefetch=2'")
    add("--python", metavar="PATH", default=sys.executable, help="the interpreter that has torch (default: this one)")
    add("--theirs", metavar="PATH",
        help="another nanogpt, or a program with its arguments and protocol, instead of PyTorch")
    add("--mpirun", metavar="PATH",
        help="mpirun that starts nanogpt's ranks as processes; 'none': threads (default: mpirun if found, else threads)")
    add("--llmc", metavar="PATH", help="llm.c's train_gpt2; it runs in its own folder")
    add("--llmc-batch", type=count, default=4, help="sequences per step that llm.c was compiled with")
    add("--llmc-block", type=count, default=64, help="tokens per sequence that llm.c was compiled with")
    add("--start-seconds", type=seconds, default=1800.0,
        help="longest time until a side is ready; torch.compile takes minutes")
    add("--answer-seconds", type=seconds, default=600.0, help="longest time of a piece")
    add("--json", metavar="FILE", help="file for all results")
    add("--verbose", action="store_true", help="print a line for each pair")
    add("--list", action="store_true", help="print what can be compared on this machine")
    add("--dry-run", action="store_true", help="print the commands without starting them")
    return parser.parse_args()


# --- what is refused before anything is started ---------------------------------------------------------------------------


def torch_version(python):
    """@return the version, or None where there is none"""
    try:
        command = [python, "-c", "import torch; print(torch.__version__)"]
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise PeersError(f"--python: '{python}' cannot be started: {error.strerror}") from error
    return found.stdout.strip() if found.returncode == 0 else None


def check_program(flag, path):
    if not os.path.isfile(path):
        hint = "; build it (cmake --preset cpu && cmake --build --preset cpu --target nanogpt) or name another"
        raise PeersError(f"{flag}: there is no '{path}'{hint if flag == '--ours' else ''}")
    if not os.access(path, os.X_OK):
        raise PeersError(f"{flag}: '{path}' is no program that can be run")


def chosen_peers(args):
    if args.theirs and args.peers and args.peers != ["other"]:
        raise PeersError(f"--theirs is the peer 'other'; expected no --peers beside it, got {','.join(args.peers)}")
    peers = ["other"] if args.theirs else args.peers or ["eager", "compiled"] + ["llmc"] * bool(args.llmc)
    if "other" in peers and not args.theirs:
        raise PeersError("the peer 'other' is what --theirs=PATH names; got none")
    if "llmc" in peers and not args.llmc:
        raise PeersError("llm.c's train_gpt2 is run only where --llmc=PATH names it; got none")
    if "llmc" in peers and LLMC_TRAINS not in itertools.product(args.model, args.pairing):
        raise PeersError("llm.c trains 124m on one rank: expected --model=124m --pairing=1rank among those compared")
    return peers


def ranks_of(args, pairing):
    return 1 if pairing == "1rank" else args.ranks


def cores_for(args, ranks):
    allowed, needed = sorted(os.sched_getaffinity(0)), ranks * args.threads
    chosen = args.cores or allowed[:needed]
    if missing := [core for core in chosen if core not in allowed]:
        raise PeersError(f"--cores: this program may use {listed(allowed)}, not {listed(missing)}")
    if len(chosen) != needed:
        have = f"got {len(chosen)} ({listed(chosen)})" if args.cores else f"there are {len(allowed)}"
        who = f"{ranks} rank{'s' * (ranks > 1)} of {args.threads} thread{'s' * (args.threads > 1)}"
        raise PeersError(f"{who}: expected {needed} core{'s' * (needed > 1)}, {have}")
    return chosen


def check_here(args, peers):
    """Everything that can be checked before anything is started. @return torch's version; None where it is not needed"""
    check_program("--ours", args.ours)
    if args.theirs:
        check_program("--theirs", args.theirs)
    if "llmc" in peers:
        check_program("--llmc", args.llmc)
    if args.mpirun not in (None, "none") and not shutil.which(args.mpirun):
        raise PeersError(f"--mpirun: '{args.mpirun}' is no program that can be run; 'none' lets ranks be threads")
    if args.data and not os.path.isfile(args.data):
        raise PeersError(f"--data: there is no file '{args.data}'")
    for pairing in args.pairing:
        cores_for(args, ranks_of(args, pairing))
    if not PYTORCH & set(peers):
        return None
    version = torch_version(args.python)
    if version is None and not args.dry_run:
        raise PeersError(f"'{args.python}' has no torch: run '{args.python} -m pip install torch', or name an interpreter "
                         "that has it by --python=PATH")
    return version


def combinations(args, peers):
    every = itertools.product(args.model, args.pairing, peers)
    return [(model, pairing, peer) for model, pairing, peer in every if peer != "llmc" or (model, pairing) == LLMC_TRAINS]
