# SPDX-License-Identifier: Apache-2.0
"""Runs two sides in turns on the same cores, and computes the ratio of their speeds."""
import random
import statistics
from dataclasses import asdict

from side import PeersError

TRIALS = 2  # pieces of one step; the last says how many steps make a piece


def bootstrap_interval(values, statistic=statistics.median, share=0.95, resamples=10_000, seed=1):
    """Percentile interval of a statistic over values drawn anew with replacement (Efron 1979)."""
    draw = random.Random(seed)
    found = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - share) / 2
    return found[int(tail * resamples)], found[min(resamples - 1, int((1 - tail) * resamples))]


def steps_of_a_piece(side, piece_seconds, limit):
    """The number of whole steps that fit, at least one."""
    for _ in range(TRIALS):
        trial = side.piece(1, limit)
    return max(1, int(piece_seconds / trial.seconds))


def take_turns(ours, theirs, pairs, piece_seconds, limit, progress):
    """Pairs of pieces; who begins alternates, so that what drifts favours nobody.

    @param limit  seconds that a piece may take
    @return a list of (ours, theirs), and the CPU seconds that a side has used in the other's pieces
    """
    sides = (ours, theirs)
    steps = {side: steps_of_a_piece(side, piece_seconds, limit) for side in sides}
    rounds, while_waiting = [], 0.0
    for number in range(pairs):
        taken = {}
        for side, other in (sides, sides[::-1])[:: 1 if number % 2 == 0 else -1]:
            idle = other.cpu_seconds()
            taken[side] = side.piece(steps[side], limit)
            while_waiting += other.cpu_seconds() - idle
        rounds.append((taken[ours], taken[theirs]))
        progress(number + 1, *rounds[-1])
    return rounds, while_waiting


def speed(piece, tokens_per_step):
    return piece.steps * tokens_per_step / piece.seconds


def summary(pieces, tokens_per_step, cores):
    """One side's figures over its pieces."""
    speeds = [speed(piece, tokens_per_step) for piece in pieces]
    return {
        "tokens_per_s": statistics.median(speeds),
        "lowest": min(speeds),
        "highest": max(speeds),
        "steps_of_a_piece": pieces[0].steps,
        "loss": pieces[-1].loss,
        "cores_used": statistics.median(piece.cpu_seconds / piece.waited for piece in pieces),
        "others": statistics.median(piece.others_seconds / piece.waited / cores for piece in pieces),
        "stolen": statistics.median(piece.stolen_seconds / piece.waited / cores for piece in pieces),
        # The part of this program's wait that the side did not count.
        "uncounted": statistics.median(1 - piece.seconds / piece.waited for piece in pieces),
        "pieces": [asdict(piece) for piece in pieces],
    }


def check_same_work(ours, theirs):
    """@param ours,theirs  what each said when it was ready; who says no element type has that of the other"""
    for key, what in (("parameters", "parameters"), ("tokens_per_step", "tokens a step"), ("ranks", "ranks")):
        if ours[key] != theirs[key]:
            raise PeersError(f"the sides do different work: {ours[key]} {what} against {theirs[key]}")
    mine, other = ours.get("dtype"), theirs.get("dtype")
    if mine and other and mine != other:
        raise PeersError(f"the sides compute in different types: {mine} against {other}")


def paired_result(rounds, tokens_per_step, cores, while_waiting):
    ratios = [speed(a, tokens_per_step) / speed(b, tokens_per_step) for a, b in rounds]
    return {
        "ours": summary([a for a, _ in rounds], tokens_per_step, cores),
        "theirs": summary([b for _, b in rounds], tokens_per_step, cores),
        "ratio": statistics.median(ratios),
        "interval": bootstrap_interval(ratios),
        "ratios": ratios,
        "cpu_seconds_while_waiting": while_waiting,
    }


def unpaired_result(pieces, seconds, ready, tokens_per_step, cores):
    """The ratio of medians of nanogpt's pieces and of llm.c's steps between them: a disturbance may hit one side only."""
    ours = summary(pieces, ready["tokens_per_step"], cores)
    speeds = [speed(piece, ready["tokens_per_step"]) for piece in pieces]
    others = [tokens_per_step / each for each in seconds]
    theirs = {"name": "llm.c", "tokens_per_s": statistics.median(others), "lowest": min(others), "highest": max(others),
              "steps_of_a_piece": 1, "seconds": seconds}
    draw = random.Random(1)

    def resampled(_):
        return statistics.median(draw.choices(speeds, k=len(speeds))) / statistics.median(draw.choices(others, k=len(others)))

    return {"ours": ours, "theirs": theirs, "ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
            "interval": bootstrap_interval([0.0], resampled)}
