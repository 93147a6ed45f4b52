# SPDX-License-Identifier: Apache-2.0
"""Runs llm.c's train_gpt2 on the host, and reads the step times that it prints."""
import os
import pty
import re
import select
import subprocess
import time

import processes
from side import PeersError, last_lines, prepare_child

POSITIONS = re.compile(rb"^max_seq_len: (\d+)$", re.MULTILINE)
PARAMETERS = re.compile(rb"^num_parameters: (\d+)$", re.MULTILINE)
STEP = re.compile(rb"^step (\d+)\b.*\(took ([\d.]+) ms\)", re.MULTILINE)


def shown(text):
    return last_lines(text.decode(errors="replace"))


def run(launch, count, limit):
    """Runs the program until it has printed `count` steps after the first, or has ended.

    @param limit  seconds that all of it may take
    @return what it has printed
    """
    # To a pipe it would print its lines only when it ends.
    reader, terminal = pty.openpty()
    try:
        process = subprocess.Popen(launch.command, env={**os.environ, **launch.environment}, cwd=launch.folder,
                                   stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, start_new_session=True,
                                   preexec_fn=lambda: prepare_child(launch.cores))
    except OSError as error:
        raise PeersError(f"llm.c: '{launch.command[0]}' cannot be started: {error.strerror}") from error
    finally:
        os.close(terminal)
    text, deadline = b"", time.monotonic() + limit
    try:
        while len(STEP.findall(text)) <= count and time.monotonic() < deadline:
            if not select.select([reader], [], [], 1.0)[0]:
                continue
            try:
                more = os.read(reader, 65536)
            except OSError:  # EIO: the last that had the terminal open has ended
                break
            if not more:
                break
            text += more.replace(b"\r", b"")
    finally:
        processes.kill(process.pid)
        process.wait()
        os.close(reader)
    return text


def step_seconds(text):
    """@return the seconds of each step but the first, in which memory is allocated"""
    times = [float(took) / 1e3 for _, took in STEP.findall(text)][1:]
    if len(times) < 2:
        raise PeersError(f"llm.c: it has printed {len(times)} steps after the first, 2 are needed ('step N: ... (took T ms)'); "
                         f"its last lines:{shown(text)}")
    return times


def check_same_model(text, ours, block, width):
    """Checks that its file of weights holds the model that nanogpt trains.

    @param ours  nanogpt's parameters, `block` positions of `width` among them; its own model has more positions
    """
    positions, parameters = POSITIONS.search(text), PARAMETERS.search(text)
    if not positions or not parameters:
        raise PeersError(f"llm.c: it does not say max_seq_len and num_parameters; its last lines:{shown(text)}")
    theirs = int(parameters[1]) - (int(positions[1]) - block) * width
    if theirs != ours:
        raise PeersError(f"the sides do different work: {ours:,} parameters with {block} positions against {theirs:,}; "
                         "llm.c's gpt2_124M.bin is expected to be GPT-2 124M")
