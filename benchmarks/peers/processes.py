# SPDX-License-Identifier: Apache-2.0
"""A session: a process and all that it has started, from /proc. It can be stopped, continued and ended, and measured.

A session is named by the process that it began with, and outlives it: processes that it leaves behind are still found.
"""
import os
import pathlib
import signal
import time

TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


def fields(stat):
    """The words of a stat file of /proc behind the program's name, which may hold blanks: state, parent, ..."""
    try:
        return pathlib.Path(stat).read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None


def members(session):
    """Living processes of the session, and of sessions that they have started."""
    children, found = {}, []
    for name in os.listdir("/proc"):
        if not name.isdigit() or not (words := fields(f"/proc/{name}/stat")) or words[0] in "ZX":
            continue
        children.setdefault(int(words[1]), []).append(int(name))
        if int(words[3]) == session:
            found.append(int(name))
    for pid in found:  # grows on the way
        found += [child for child in children.get(pid, []) if child not in found]
    return sorted(found)


def send(pids, which):
    for pid in pids:
        try:
            os.kill(pid, which)
        except ProcessLookupError:
            pass


def is_stopped(pid):
    """Whether all of its threads are stopped or have ended."""
    threads = pathlib.Path(f"/proc/{pid}/task").glob("*/stat")
    return all(words is None or words[0] in "TtZX" for words in map(fields, threads))


def stop(session, seconds=10.0):
    """Stops all of it, and returns when nothing of it can run. @return whether that was within `seconds`"""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pids = members(session)
        send(pids, signal.SIGSTOP)
        if all(map(is_stopped, pids)) and members(session) == pids:  # none was started meanwhile
            return True
        time.sleep(0.001)
    return False


def resume(session):
    send(members(session), signal.SIGCONT)


def kill(session):
    """Returns when nothing of it is left, or after 10 seconds."""
    stop(session)  # so that none starts another
    deadline = time.monotonic() + 10
    while (pids := members(session)) and time.monotonic() < deadline:
        send(pids, signal.SIGKILL)
        time.sleep(0.001)


def cpu_seconds(session):
    """CPU seconds of its living processes, in user and system mode."""
    words = (fields(f"/proc/{pid}/stat") for pid in members(session))
    return TICK * sum(int(w[11]) + int(w[12]) for w in words if w)


def pss_bytes(session):
    """Its memory; what processes share counts once. 0 where the system does not tell."""
    total = 0
    for pid in members(session):
        try:
            text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def busy_seconds(cores):
    """Seconds in which the cores have worked for anybody, and in which the machine below a virtual one had them."""
    try:
        lines = pathlib.Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    wanted = {f"cpu{core}" for core in cores}
    rows = [[int(word) for word in line.split()[1:9]] for line in lines if line.split()[0] in wanted]
    # user nice system idle iowait irq softirq steal
    return TICK * sum(r[0] + r[1] + r[2] + r[5] + r[6] for r in rows), TICK * sum(r[7] for r in rows)
