"""Which LoRA of a run is picked: the one that a person marked, else the one that wins a blind vote.

A vote is about two samples of one prompt whose LoRAs are not named. Votes and marks are lines of `votes.jsonl` in the
run's folder, each fsynced before the next pair is shown, so that neither a killed server nor two browsers lose one.
"""

import json
import os
import random
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from guards.metrics import utc_now
from runs.files import explained
from runs.growing import entries
from ui.run.snapshots import Evolution

FILE = "votes.jsonl"
ENOUGH = 10  # votes before the LoRA with most wins is picked
MOST = 8  # LoRAs that take part: more need more votes than a person gives
POINTS = {"left": (1.0, 0.0), "equal": (0.5, 0.5), "right": (0.0, 1.0)}  # of the left and of the right LoRA


class Pair(NamedTuple):
    """Two samples of one prompt; left and right are steps."""

    prompt: int
    left: int
    right: int


def _lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    return [entry for entry in entries(lines) if entry.get("kind") == kind]


def _append(folder: Path, **values: Any) -> None:
    line = json.dumps({"t": utc_now(), **values})
    with explained("store the vote"), (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")  # the line before may be torn
        file.flush()
        os.fsync(file.fileno())


def vote(folder: Path, pair: Pair, choice: str) -> None:
    """Store which side of a pair is better: "left", "right" or "equal". Raises RunError: it could not be written."""
    _append(folder, kind="vote", choice=choice, **pair._asdict())


def mark(folder: Path, step: int | None) -> None:
    """Mark the LoRA of a step as the best; None removes the mark. Raises RunError: it could not be written."""
    _append(folder, kind="pick", step=step)


def votes(folder: Path) -> list[tuple[Pair, str]]:
    """The votes of a run. A line that is damaged or incomplete is left out."""
    found = []
    for entry in _lines(folder, "vote"):
        numbers = [number for key in Pair._fields if type(number := entry.get(key)) is int]
        if len(numbers) == len(Pair._fields) and entry.get("choice") in POINTS:
            found.append((Pair(*numbers), entry["choice"]))
    return found


def wins(votes: list[tuple[Pair, str]]) -> list[tuple[int, float, int]]:
    """(step, comparisons won, comparisons) of each LoRA with votes, the best first. An equal pair counts half."""
    scores: dict[int, list[float]] = defaultdict(list)
    for pair, choice in votes:
        for step, points in zip((pair.left, pair.right), POINTS[choice], strict=True):
            scores[step].append(points)
    rows = [(step, sum(found), len(found)) for step, found in scores.items()]
    # One comparison more won and one more lost (Laplace): one that won its only one is not ahead of 9 of 10.
    return sorted(rows, key=lambda row: (-(row[1] + 1) / (row[2] + 2), row[0]))


def marked(folder: Path) -> int | None:
    """The step that a person marked as the best; None without a mark."""
    steps = [entry.get("step") for entry in _lines(folder, "pick")]
    return steps[-1] if steps and type(steps[-1]) is int else None


def picked(folder: Path) -> int | None:
    """The step that is marked, else the one that won most of ENOUGH votes; None without either."""
    if (step := marked(folder)) is not None:
        return step
    cast = votes(folder)
    return wins(cast)[0][0] if len(cast) >= ENOUGH else None


def next_pair(found: Evolution, cast: list[tuple[Pair, str]]) -> Pair | None:
    """The pair to vote on next: the LoRAs that were compared least, shuffled; None without two of the same prompt.

    At most MOST LoRAs take part, evenly spaced, the last one among them.
    """
    able = [one for one in found.snapshots if one.step and one.lora is not None and one.samples]
    if len(able) > MOST:
        able = [able[i * (len(able) - 1) // (MOST - 1)] for i in range(MOST)]
    prompts = {one.step: {sample.prompt for sample in one.samples} for one in able if one.step}
    seen = Counter(step for pair, _ in cast for step in (pair.left, pair.right))
    pairs = [two for two in combinations(prompts, 2) if prompts[two[0]] & prompts[two[1]]]
    if not pairs:
        return None
    left, right = min(pairs, key=lambda two: (seen[two[0]] + seen[two[1]], random.random()))
    sides = random.sample([left, right], 2)
    return Pair(random.choice(sorted(prompts[left] & prompts[right])), *sides)
