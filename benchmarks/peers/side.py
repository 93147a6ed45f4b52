# SPDX-License-Identifier: Apache-2.0
"""One side of a comparison: a trainer that is started once, and runs pieces of some steps on request.

The protocol is that of `nanogpt bench --pieces` (examples/transformer/run/pieces.hpp). Between its pieces a side is stopped with
all its processes, so that no thread of it spins or polls on the cores that the other side has then.
"""
import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import subprocess
import time
from dataclasses import dataclass

import processes


class PeersError(Exception):
    """An error that prevents a comparison, as a sentence for the user."""


@dataclass
class Piece:
    steps: int
    seconds: float  # by the side's own clock
    loss: float
    waited: float  # seconds from the order to the answer, by the clock of this program
    cpu_seconds: float
    others_seconds: float  # of the cores' time, in which they worked for others
    stolen_seconds: float


@dataclass
class Launch:
    """Start command of a side, and its environment."""

    name: str
    command: list
    environment: dict  # beside that of this program
    folder: str
    cores: list  # of the machine


def listed(values):
    return ", ".join(map(str, values))


def last_lines(text, count=8):
    return "".join(f"\n    {line}" for line in text.splitlines()[-count:])


def prepare_child(cores):
    """In the child: the cores, and its end when this program ends in whatever way (a side may be stopped then)."""
    os.sched_setaffinity(0, cores)
    die_with_parent = 1
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)


class Side:
    def __init__(self, launch, scratch):
        self.launch, self.name = launch, launch.name
        self.said, self.rest = [], b""  # lines of output that are none of the protocol; what is no whole line yet
        self.pieces = 0
        self.errors = pathlib.Path(scratch) / f"{self.name}.errors"
        with open(self.errors, "wb") as errors:
            try:
                self.process = subprocess.Popen(
                    launch.command, env={**os.environ, **launch.environment}, cwd=launch.folder, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                    preexec_fn=lambda: prepare_child(launch.cores))
            except OSError as error:
                raise PeersError(f"{self.name}: '{launch.command[0]}' cannot be started: {error.strerror}") from error
        os.set_blocking(self.process.stdout.fileno(), False)

    def wait_ready(self, seconds):
        return self._answer("ready", seconds)

    def piece(self, steps, seconds):
        """Lets it take steps, and stops it. @param seconds  the longest that it may take"""
        pid, cores = self.process.pid, self.launch.cores
        processes.resume(pid)
        cpu, (busy, stolen) = processes.cpu_seconds(pid), processes.busy_seconds(cores)
        begin = time.monotonic()
        try:
            self.process.stdin.write(f"{steps}\n".encode())
            self.process.stdin.flush()
        except OSError:
            raise self._died() from None
        line = self._answer("piece", seconds)
        waited = time.monotonic() - begin
        cpu = processes.cpu_seconds(pid) - cpu
        busy_now, stolen_now = processes.busy_seconds(cores)
        self.pause()
        self.pieces += 1
        if line["steps"] != steps or not line["seconds"] > 0:
            raise PeersError(f"{self.name}: asked for {steps} steps, it answers {line}")
        return Piece(steps, line["seconds"], line["loss"], waited, cpu, max(0.0, busy_now - busy - cpu), stolen_now - stolen)

    def pause(self):
        if not processes.stop(self.process.pid):
            raise PeersError(f"{self.name}: its processes cannot be stopped")

    def cpu_seconds(self):
        return processes.cpu_seconds(self.process.pid)

    def memory(self):
        return processes.pss_bytes(self.process.pid)

    def end(self):
        processes.kill(self.process.pid)
        self.process.wait()
        with contextlib.suppress(OSError):  # what a side that died has not read is written once more
            self.process.stdin.close()
        self.process.stdout.close()

    def _answer(self, kind, seconds):
        """The next line of the protocol, which must be of this kind."""
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self.rest:
                line, _, self.rest = self.rest.partition(b"\n")
                text = line.decode(errors="replace")
                if not text.startswith("{"):
                    self.said.append(text)
                    continue
                answer = json.loads(text)
                if answer.get("kind") != kind:
                    raise PeersError(f"{self.name}: expected a line of the kind '{kind}', got {text}")
                return answer
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeersError(f"{self.name}: no answer within {seconds:.0f} s; its last lines:{self._lines()}")
            if not select.select([self.process.stdout], [], [], left)[0]:
                continue
            more = self.process.stdout.read()
            if not more:
                raise self._died()
            self.rest += more

    def _died(self):
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return PeersError(f"{self.name}: it closed its output after {self.pieces} pieces; its last lines:{self._lines()}")
        how = f"with code {code}" if code >= 0 else f"by signal {-code}"
        return PeersError(f"{self.name}: it ended {how} after {self.pieces} pieces; its last lines:{self._lines()}")

    def _lines(self):
        return last_lines("\n".join(self.said) + "\n" + self.errors.read_text(errors="replace"))
