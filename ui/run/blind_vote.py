"""The blind vote: pairs of samples without labels, and how often each LoRA won.

A vote is a line that is appended to `votes.jsonl` in the run's folder and fsynced before the next pair is shown, so
that neither a killed server nor two browsers lose one. The result is a plain count of these lines.
"""

import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from guards.metrics import utc_now
from runs.evolution import Evolution
from runs.files import RunError, explained, fsync_folder
from runs.metrics_lines import entries

FILE = "votes.jsonl"
MOST = 8  # LoRAs that take part: more need more votes than a person gives
ENOUGH = 10  # votes before the one with most wins is marked
CHOICES = ("left", "right", "equal")


@dataclass(frozen=True)
class Pair:
    """Two samples of one prompt; left and right are steps."""

    prompt: int
    left: int
    right: int


@dataclass
class Ballot:
    """The votes since the last reset as (pair, choice), and the step of the LoRA that a person marked as the best."""

    votes: list[tuple[Pair, str]] = field(default_factory=list)
    pick: int | None = None


def read(folder: Path) -> Ballot:
    """The votes of a run. A line that is damaged or incomplete is left out."""
    try:
        data = (folder / FILE).read_bytes()
    except OSError:
        return Ballot()
    ballot = Ballot()
    for entry in entries(data.splitlines()):
        numbers = [n for key in ("prompt", "left", "right") if type(n := entry.get(key)) is int]
        if entry.get("kind") == "reset":
            ballot = Ballot()
        elif entry.get("kind") == "pick":
            ballot.pick = entry["step"] if type(entry.get("step")) is int else None
        elif entry.get("kind") == "vote" and entry.get("choice") in CHOICES and len(numbers) == 3:
            ballot.votes.append((Pair(*numbers), entry["choice"]))
    return ballot


def append(folder: Path, **values: Any) -> None:
    """Append a line: {"kind": "vote", "choice", "prompt", "left", "right"}, {"kind": "pick", "step"} or {"kind": "reset"}.

    Raises:
        RunError: it could not be written, for example because the disk is full.
    """
    path = folder / FILE
    with explained("store the vote"):
        new = not path.exists()
        with path.open("ab+") as file:
            line = json.dumps({"t": utc_now(), **values}).encode() + b"\n"
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line  # a power cut tore the last line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if new:
            fsync_folder(folder)


def pick(folder: Path, step: int | None, found: Evolution) -> None:
    """Mark the LoRA of a step as the best; None removes the mark.

    Raises:
        RunError: there is no LoRA of this step, or the mark could not be stored.
    """
    steps = [one.step for one in found.snapshots if one.lora is not None and one.step is not None]
    if step is not None and step not in steps:
        known = f"use one of {', '.join(map(str, steps))}" if steps else "the run has saved none yet"
        raise RunError(f"There is no LoRA of step {str(step)[:40]}; {known}")
    append(folder, kind="pick", step=step)


def wins(ballot: Ballot) -> list[tuple[int, float, int]]:
    """(step, comparisons won, comparisons) of each LoRA with votes, the best first. An equal pair counts half."""
    scores: dict[int, list[float]] = {}
    for pair, choice in ballot.votes:
        for step, side in ((pair.left, "left"), (pair.right, "right")):
            scores.setdefault(step, []).append(0.5 if choice == "equal" else float(choice == side))
    rows = [(step, sum(found), len(found)) for step, found in scores.items()]
    # One comparison more won and one more lost (Laplace): a LoRA that won its only one is not ahead of one that won 9 of 10.
    return sorted(rows, key=lambda row: (-(row[1] + 1) / (row[2] + 2), row[0]))


def picked(folder: Path) -> int | None:
    """The step that a person marked as the best, else the one that won most of ENOUGH votes; None without either."""
    ballot = read(folder)
    if ballot.pick is not None or len(ballot.votes) < ENOUGH:
        return ballot.pick
    return wins(ballot)[0][0]


def candidates(found: Evolution) -> list[int]:
    """The steps that take part: of those with a LoRA and samples at most MOST, evenly spaced, the last one among them."""
    able = [one.step for one in found.snapshots if one.step and one.lora is not None and one.samples]
    return able if len(able) <= MOST else [able[i * (len(able) - 1) // (MOST - 1)] for i in range(MOST)]


def next_pair(found: Evolution, ballot: Ballot, rng: random.Random | None = None) -> Pair | None:
    """The pair to vote on next: the LoRAs that were compared least, sides shuffled; None without two of the same prompt."""
    rng = rng or random.Random()
    steps = candidates(found)
    prompts = {one.step: {sample.prompt for sample in one.samples} for one in found.snapshots if one.step in steps}
    seen = Counter(step for pair, _ in ballot.votes for step in (pair.left, pair.right))
    pairs = [two for two in combinations(steps, 2) if prompts[two[0]] & prompts[two[1]]]
    if not pairs:
        return None
    left, right = min(pairs, key=lambda two: (seen[two[0]] + seen[two[1]], rng.random()))
    sides = [left, right]
    rng.shuffle(sides)
    return Pair(rng.choice(sorted(prompts[left] & prompts[right])), *sides)
