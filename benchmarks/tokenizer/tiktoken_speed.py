#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of `nanogpt prepare --tokenizer=gpt2` with tiktoken's, on one text, in turns.

    pip install tiktoken
    python3 benchmarks/tokenizer/tiktoken_speed.py build/cpu/examples/nanogpt/nanogpt TEXT ENCODER_JSON VOCAB_BPE [--copies=20]

nanogpt's times are those of the whole program: it reads GPT-2's files and the text (twice), encodes, writes tokens. tiktoken's
are those of its encode call alone, on a text in memory; with two threads, on as many parts as there are lines of 1 MB.
Prints the best and the median of the rounds, in MB (10^6 bytes) per second.
"""
import argparse
import importlib.metadata
import pathlib
import statistics
import subprocess
import tempfile
import time

import tiktoken
import tiktoken.load

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def parts(text, length=1_000_000):
    """The text in pieces that end with a line."""
    pieces, begin = [], 0
    while begin < len(text):
        end = text.find("\n", begin + length)
        end = len(text) if end < 0 else end
        pieces.append(text[begin:end])
        begin = end
    return pieces


def main():
    parser = argparse.ArgumentParser()
    for name in ("nanogpt", "text", "encoder_json", "vocab_bpe"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--copies", type=int, default=20, help="number of copies of the text, one after the other")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    files = {name: str(getattr(args, name).resolve()) for name in ("nanogpt", "encoder_json", "vocab_bpe")}

    text = args.text.read_text() * args.copies
    size = len(text.encode())
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(files["vocab_bpe"], files["encoder_json"])
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    pieces = parts(text)

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text"
        path.write_text(text)

        def prepare(threads):
            command = [files["nanogpt"], "prepare", "--dataset=d", f"--data={path}", "--tokenizer=gpt2", f"--threads={threads}",
                       f"--encoder_json={files['encoder_json']}", f"--vocab_bpe={files['vocab_bpe']}"]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)

        ways = {
            "nanogpt prepare, 1 thread": lambda: prepare(1),
            f"tiktoken {importlib.metadata.version('tiktoken')}, 1 thread": lambda: encoding.encode_ordinary(text),
            "nanogpt prepare, 2 threads": lambda: prepare(2),
            "tiktoken, 2 threads": lambda: encoding.encode_ordinary_batch(pieces, num_threads=2),
        }
        times = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, run in ways.items():
                begin = time.perf_counter()
                run()
                times[way].append(time.perf_counter() - begin)
    print(f"{size / 1e6:.1f} MB, {args.rounds} rounds\n{'':30} best MB/s  median MB/s")
    for way, seconds in times.items():
        print(f"{way:30} {size / min(seconds) / 1e6:9.1f} {size / statistics.median(seconds) / 1e6:12.1f}")


if __name__ == "__main__":
    main()
