"""The blind vote: pairs of samples without labels, and which LoRA their votes name.

A vote is a line that is appended to `votes.jsonl` in the run's folder and fsynced before the answer, so that neither a killed
server nor two browsers lose one. What the vote says is computed from these lines alone (Bradley and Terry's model: each LoRA
has a strength, and the difference of two strengths gives the chance that one is preferred). The pair itself travels in its
id, so a vote is accepted by a server that was started after the pair was shown.
"""

import base64
import json
import os
import random
import re
import secrets
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from guards.metrics import utc_now
from runs.evolution import Evolution, Snapshot, entries
from runs.files import RunError, explained, fsync_folder

FILE = "votes.jsonl"
FILE_BYTES = 4 << 20  # of the votes, from their end
MOST = 8  # LoRAs that take part: more need more votes than a person gives
EACH = 3  # votes for each LoRA that takes part, before one is named
LEAST = 8  # votes before one is named
SURE = 0.8  # chance of being the best, with which a LoRA is named
DRAWS = 4000
PRIOR = 1.5  # standard deviation of the strengths before the first vote
CHOICES = ("left", "right", "equal")
ID = re.compile(r"[A-Za-z0-9_-]{8}\.[A-Za-z0-9_-]{4,120}")


@dataclass(frozen=True)
class Pair:
    """Two samples of one prompt. id: names the pair in the vote; left, right: steps."""

    id: str
    prompt: int
    left: int
    right: int


@dataclass(frozen=True)
class Vote:
    """A vote for the sample of step `left`, that of `right`, or neither."""

    pair: Pair
    choice: str

    @property
    def score(self) -> float:
        """1 when the left one won, 0 when the right one did, 0.5 for equal ones."""
        return {"left": 1.0, "right": 0.0}.get(self.choice, 0.5)


@dataclass
class Ballot:
    """The votes since the last reset, and the LoRA that a person picked (its step; None: nobody did)."""

    votes: list[Vote] = field(default_factory=list)
    pick: int | None = None


@dataclass(frozen=True)
class Standing:
    """A LoRA's place in the vote. chance: of being the best of those that take part."""

    step: int
    won: float
    seen: int
    strength: float
    chance: float


# The file -------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Ballot:
    """The votes of a run. A line that is damaged or incomplete is left out; a vote that was sent twice counts once."""
    try:
        with (folder / FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - FILE_BYTES))
            data = file.read(FILE_BYTES)
    except OSError:
        return Ballot()
    ballot, known = Ballot(), set()
    for entry in entries(data):
        kind = entry.get("kind")
        if kind == "reset":
            ballot = Ballot()
        elif kind == "pick":
            step = entry.get("step")
            ballot.pick = step if type(step) is int else None
        elif kind == "vote" and entry.get("choice") in CHOICES and entry.get("id") not in known:
            try:
                pair = pair_of(entry.get("id"))
            except RunError:
                continue
            known.add(pair.id)
            ballot.votes.append(Vote(pair, str(entry["choice"])))
    return ballot


def append(folder: Path, **values: Any) -> None:
    """Append one line and fsync it.

    Raises:
        RunError: it could not be written, for example because the disk is full.
    """
    line = (json.dumps({"t": utc_now(), **values}) + "\n").encode()
    path = folder / FILE
    with explained("store the vote"):
        new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            if os.lseek(handle, 0, os.SEEK_END):
                os.lseek(handle, -1, os.SEEK_END)
                if os.read(handle, 1) != b"\n":  # a power cut tore the last line
                    line = b"\n" + line
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)
        if new:
            fsync_folder(folder)


def cast(folder: Path, pair_id: object, choice: object, found: Evolution) -> None:
    """Store a vote.

    Raises:
        RunError: the pair or the choice is invalid, a step has no sample any more, or the vote could not be stored.
    """
    if choice not in CHOICES:
        raise RunError(f"The choice is {str(choice)[:40]!r}; use one of {', '.join(CHOICES)}")
    pair = pair_of(pair_id)
    for step in (pair.left, pair.right):
        sample_of(found, pair, step)
    append(folder, kind="vote", id=pair.id, choice=choice, prompt=pair.prompt, left=pair.left, right=pair.right)


def pick(folder: Path, step: object, found: Evolution) -> None:
    """Mark the LoRA of a step as picked; None removes the mark.

    Raises:
        RunError: there is no LoRA of this step, or the mark could not be stored.
    """
    if step is not None:
        snapshot = found.at_step(step) if type(step) is int else None
        if snapshot is None or snapshot.lora is None:
            raise RunError(f"There is no LoRA of step {str(step)[:40]}; {_known(found)}")
    append(folder, kind="pick", step=step)


def _known(found: Evolution) -> str:
    steps = [one.step for one in found.snapshots if one.lora is not None and one.step is not None]
    return f"use one of {', '.join(map(str, steps))}" if steps else "the run has saved none yet"


def reset(folder: Path) -> None:
    """Start over: earlier votes and the pick no longer count. They stay in the file.

    Raises:
        RunError: it could not be stored.
    """
    append(folder, kind="reset")


def picked(folder: Path, found: Evolution) -> int | None:
    """The step of the LoRA that a person picked, else the one that the votes name; None without either."""
    ballot = read(folder)
    if ballot.pick is not None:
        return ballot.pick
    steps = candidates(found, ballot.votes)
    votes = counted(steps, ballot.votes)
    return named(standings(steps, votes), votes) if votes else None


# Pairs ----------------------------------------------------------------------------------------------------------------


def candidates(found: Evolution, votes: list[Vote]) -> list[int]:
    """The steps that take part: of those with a LoRA and samples at most MOST, evenly spaced, the last one among them.

    Steps with votes stay when more LoRAs are saved.
    """
    able = [one.step for one in found.snapshots if one.step and one.lora is not None and one.samples]
    if len(able) <= MOST:
        return able
    spaced = _spaced(able, MOST)
    voted = {step for vote in votes for step in (vote.pair.left, vote.pair.right)} & set(able)
    return sorted(voted | set(_spaced([step for step in spaced if step not in voted], MOST - len(voted))))


def _spaced(steps: list[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spaced, the last one among them."""
    if len(steps) <= count:
        return steps
    return [steps[-1 - i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]


def _id(prompt: int, left: int, right: int) -> str:
    inside = base64.urlsafe_b64encode(f"{prompt}:{left}:{right}".encode()).decode().rstrip("=")
    return f"{secrets.token_urlsafe(6)}.{inside}"


def pair_of(pair_id: object) -> Pair:
    """The pair of an id.

    Raises:
        RunError: it is not the id of a pair.
    """
    try:
        if not isinstance(pair_id, str) or not ID.fullmatch(pair_id):
            raise ValueError
        inside = pair_id.partition(".")[2]
        text = base64.urlsafe_b64decode(inside + "=" * (-len(inside) % 4)).decode("ascii")
        if not re.fullmatch(r"\d{1,6}:\d{1,12}:\d{1,12}", text, re.ASCII):
            raise ValueError
        prompt, left, right = map(int, text.split(":"))
        if left == right:
            raise ValueError
    except ValueError as error:
        raise RunError("This is not a pair of the vote; ask for the next one") from error
    return Pair(pair_id, prompt, left, right)


def next_pair(found: Evolution, ballot: Ballot, rng: random.Random | None = None) -> Pair:
    """The pair to vote on next: each LoRA twice first, then those that may be the best, sides shuffled.

    Two draws from what is known of the strengths choose the pair (double Thompson sampling: Wu and Liu, arXiv:1604.07101).

    Raises:
        RunError: fewer than two LoRAs have samples of the same prompt.
    """
    rng = rng or random.Random()
    shown = {one.step: {sample.prompt for sample in one.samples} for one in found.snapshots if one.step}
    steps = candidates(found, ballot.votes)
    able = [(a, b) for a, b in combinations(steps, 2) if shown[a] & shown[b]]
    if not able:
        raise RunError(too_few(found))
    seen = Counter(step for vote in ballot.votes for step in (vote.pair.left, vote.pair.right))
    often = Counter(frozenset((vote.pair.left, vote.pair.right)) for vote in ballot.votes)
    rare = min(seen[step] for pair in able for step in pair)
    if rare < 2:
        left, right = min(
            able, key=lambda pair: (sum(min(seen[s], 2) for s in pair), often[frozenset(pair)], rng.random())
        )
    else:
        first, second = (_draw(steps, ballot.votes, rng) for _ in range(2))
        order = {step: place for place, step in enumerate(sorted(steps, key=first.__getitem__, reverse=True))}
        best = min(order, key=lambda step: order[step])
        rivals = [pair for pair in able if best in pair] or able
        left, right = max(rivals, key=lambda pair: second[pair[1] if pair[0] == best else pair[0]])
    asked = Counter(
        (frozenset((vote.pair.left, vote.pair.right)), vote.pair.prompt) for vote in ballot.votes
    )  # each prompt in turn
    prompt = min(shown[left] & shown[right], key=lambda p: (asked[frozenset((left, right)), p], rng.random()))
    if rng.random() < 0.5:
        left, right = right, left
    return Pair(_id(prompt, left, right), prompt, left, right)


def too_few(found: Evolution) -> str:
    """Why there is no vote yet, and what to do."""
    count = len(candidates(found, []))
    have = "none has" if not count else "only one has" if count == 1 else "no two have the same prompt"
    return (
        f"A blind vote compares LoRAs by samples of the same step; {have}. Save LoRAs and draw samples at the same steps: "
        "set “Save a checkpoint every N steps” and “Generate samples every N steps” to the same number."
    )


def sample_of(found: Evolution, pair: Pair, step: int) -> Path:
    """The sample of one side of a pair.

    Raises:
        RunError: it is gone.
    """
    snapshot: Snapshot | None = found.at_step(step)
    for sample in snapshot.samples if snapshot else ():
        if sample.prompt == pair.prompt:
            return sample.path
    raise RunError("A sample of this pair is gone; ask for the next pair")


# Strengths ------------------------------------------------------------------------------------------------------------


def counted(steps: list[int], votes: list[Vote]) -> list[Vote]:
    """The votes on LoRAs that take part."""
    return [vote for vote in votes if vote.pair.left in steps and vote.pair.right in steps]


def fit(steps: list[int], votes: list[Vote]) -> tuple[Any, Any]:
    """(strengths, their covariance) as arrays: the most likely strengths under a normal prior, and Laplace's approximation."""
    import numpy as np

    place = {step: i for i, step in enumerate(steps)}
    games = [(place[vote.pair.left], place[vote.pair.right], vote.score) for vote in counted(steps, votes)]
    strength, precision = np.zeros(len(steps)), np.eye(len(steps)) / PRIOR**2
    hessian = precision
    for _ in range(25):  # Newton's method on a concave function
        slope, hessian = -strength / PRIOR**2, precision.copy()
        for left, right, score in games:
            p = 1 / (1 + np.exp(strength[right] - strength[left]))
            slope[left] += score - p
            slope[right] -= score - p
            weight = p * (1 - p)
            hessian[left, left] += weight
            hessian[right, right] += weight
            hessian[left, right] -= weight
            hessian[right, left] -= weight
        change = np.linalg.solve(hessian, slope)
        strength = strength + np.clip(change, -2, 2)
        if np.abs(change).max(initial=0.0) < 1e-9:
            break
    return strength, np.linalg.inv(hessian)


def _draw(steps: list[int], votes: list[Vote], rng: random.Random) -> dict[int, float]:
    import numpy as np

    strength, covariance = fit(steps, votes)
    drawn = np.random.default_rng(rng.getrandbits(32)).multivariate_normal(strength, covariance)
    return dict(zip(steps, map(float, drawn), strict=True))


def standings(steps: list[int], votes: list[Vote]) -> list[Standing]:
    """The LoRAs that take part, the strongest first. The same votes give the same numbers."""
    import numpy as np

    if not steps:
        return []
    strength, covariance = fit(steps, votes)
    draws = np.random.default_rng(0).multivariate_normal(strength, covariance, DRAWS)
    chances = np.bincount(draws.argmax(axis=1), minlength=len(steps)) / DRAWS
    won, seen = dict.fromkeys(steps, 0.0), dict.fromkeys(steps, 0)
    for vote in counted(steps, votes):
        for step, score in ((vote.pair.left, vote.score), (vote.pair.right, 1 - vote.score)):
            seen[step] += 1
            won[step] += score
    found = [
        Standing(step, won[step], seen[step], float(strength[i]), float(chances[i])) for i, step in enumerate(steps)
    ]
    return sorted(found, key=lambda one: one.strength, reverse=True)


def enough(steps: int) -> int:
    """The votes after which a LoRA is named, when `steps` LoRAs take part."""
    return max(LEAST, EACH * steps)


def named(found: list[Standing], votes: list[Vote]) -> int | None:
    """The step that the votes name: the leader once it is the best with a chance of SURE, or after twice the votes."""
    if len(found) < 2:
        return None
    leader = max(found, key=lambda one: one.chance)
    needed = enough(len(found))
    return leader.step if len(votes) >= (needed if leader.chance >= SURE else 2 * needed) else None


def verdict(found: list[Standing], votes: list[Vote]) -> str:
    """What the votes say, with how certain it is, for people."""
    needed, count = enough(len(found)), len(votes)
    if len(found) < 2 or not count:
        return f"Vote on {needed} pairs, then the vote names a LoRA." if len(found) > 1 else ""
    leader = max(found, key=lambda one: one.chance)
    won = f"{leader.won:g} of {leader.seen}"
    chance = f"{min(leader.chance, 0.99):.0%}"
    if (winner := named(found, votes)) is None:
        left = needed - count if count < needed else 2 * needed - count
        state = "leads" if leader.chance < SURE else "is ahead"
        return (
            f"Step {leader.step:,} {state}: it won {won} comparisons, and is the best of {len(found)} with a chance of "
            f"{chance}. At most {left} more votes name a LoRA."
        )
    if leader.chance >= SURE:
        return f"The vote picks step {winner:,}: it won {won} comparisons, and is the best of {len(found)} with a chance of {chance}."
    rivals = [one.step for one in found if one.step != winner and one.chance >= leader.chance / 2]
    others = " and ".join(f"{step:,}" for step in rivals[:3])
    also = f" You like step {others} about as much." if rivals else ""
    return (
        f"The vote picks step {winner:,}, but by little: it won {won} comparisons, and is the best of {len(found)} with a "
        f"chance of {chance}.{also}"
    )
