"""Which rank is stuck, and where: a pure decision over the ranks' records, their main threads' stacks and their states.

Decision: the rank that others wait for is never one that waits itself. A rank waits when the innermost frame of its
main thread belongs to a collective operation; a frame further out is not enough, because a rank can hang inside of one.
Only then do the counters decide: steps, check points, phases, and last how long each has been silent. Where the
evidence does not tell, nobody is accused.

A rank is a dictionary with the keys of UNKNOWN, as `records` makes it of a heartbeat: it is stored in the incident. Of
a run on several machines, each monitor has the heartbeats of its own machine alone. `Group.lines` is the report as text,
for the terminal and, as a block of code, for the incident's report.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from guards.heartbeat import CHECK_POINTS, POINTS, WAITS, Beat
from monitor.detect import probe
from monitor.detect.probe import Frame
from monitor.phrases import PHASES, count, duration, printable
from monitor.process import platform
from monitor.process.platform import Moment

Rank = dict[str, Any]
DEPTH = 8  # frames of the stuck rank
TITLE = max(map(len, CHECK_POINTS.values()))

UNKNOWN: Rank = {
    "rank": 0, "world": 1, "local_rank": None, "pid": 0, "phase": "import", "step": 0, "planned": 0, "done": 0,
    "total": 0, "note": "", "outcome": "running", "point": "", "count": 0, "silent_s": 0.0, "point_ago_s": None,
    "points": [], "host": "", "device": "", "backend": "", "environment": {}, "alive": None, "missing": False,
}  # fmt: skip
"""A rank of which nothing is known. alive: None, unknown. missing: it should be there and has no record."""
BARRIER = "ranks at a barrier"  # in the note of a rank whose deadline expired while it waited for the others
STEPS = ("first_step", "step")
FAILED, ENDED = ("failed", "deadline"), ("done", "stopped")  # outcomes
MIN_SILENCE_S = 0.5  # one rank must be silent this much longer than the others to be the one that they wait for
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python")
_TABLE = tomllib.loads(Path(__file__).with_name("ranks.toml").read_text(encoding="utf-8"))
ADVICE: dict[str, str] = _TABLE["advice"]


# ---- one rank ----


def records(beats: Sequence[Beat], now: Moment) -> list[Rank]:
    """Every rank that should be there, sorted; one without a heartbeat is marked as missing."""
    found = [_record(beat, now) for beat in beats]
    return sorted([*found, *missing(found)], key=lambda r: r["rank"])


def _record(beat: Beat, now: Moment) -> Rank:
    """What the report keeps of a rank's heartbeat."""
    left = beat.outcome != "running" or (beat.count and beat.phase in STEPS)  # the check point that it reached last
    points = []
    for number, (name, at_s, spent_s) in enumerate(zip(POINTS, beat.reached, beat.spent, strict=False), 1):
        if at_s:
            spent_s += now.mono_s - beat.point_s if name == beat.point and not left else 0.0
            points.append({
                "number": number, "name": name, "at": platform.utc(now.wall_s - (now.mono_s - at_s)),
                "elapsed_s": round(at_s - beat.started_s, 6), "spent_s": round(spent_s, 3),
            })  # fmt: skip
    alive: bool | None = None
    with contextlib.suppress(OSError):
        process = platform.process_info(beat.pid)
        alive = process is not None and not process.dead
    return {
        **{name: getattr(beat, name, unknown) for name, unknown in UNKNOWN.items()},
        **{name: beat.about.get(name) or UNKNOWN[name] for name in ("host", "device", "backend", "environment")},
        "silent_s": round(now.mono_s - beat.beat_s, 2),
        "point_ago_s": round(now.mono_s - beat.point_s, 2) if beat.point else None,
        "points": points,
        "alive": alive,
    }


def missing(ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks that should be on this machine and have no record."""
    world = max((r["world"] for r in ranks), default=0)
    expected = set(range(world))
    for rank in ranks:
        size, first = str(rank["environment"].get("LOCAL_WORLD_SIZE", "")), rank["rank"] - (rank["local_rank"] or 0)
        expected = set(range(first, first + int(size))) if size.isdecimal() else expected
    absent = sorted(expected - {r["rank"] for r in ranks})
    return [{**UNKNOWN, "rank": number, "world": world, "missing": True} for number in absent]


def at_check_point(rank: Rank) -> bool:
    """Is it at a check point of its start, or at the end? Else it trains."""
    return (bool(rank["points"] or rank["missing"]) and not rank["count"]) or rank["point"] == "finished"


def place(rank: Rank) -> str:
    """`check point 4 (base model)` while it starts or ends, else `step 91` or `saving a checkpoint after step 90`."""
    if at_check_point(rank):
        return f"check point {_numbered(rank['point'])}" if rank["point"] else "before check point 1"
    if _in_step(rank):
        return f"step {rank['step'] + 1}"
    return str(PHASES.get(rank["phase"], rank["phase"])) + (f" after step {rank['step']}" if rank["step"] else "")


def _numbered(point: str) -> str:
    return f"{POINTS.index(point) + 1} ({CHECK_POINTS[point]})"


def _says_it_waits(rank: Rank) -> bool:
    return bool(rank["note"].startswith(WAITS)) and rank["phase"] != "step"  # a step leaves the note of before in place


def _in_step(rank: Rank) -> bool:
    """Is it in a step? One that waits for a save of rank 0 has begun its next step."""
    return rank["phase"] in STEPS or _says_it_waits(rank)


def _is(frames: Sequence[Frame], patterns: Iterable[str]) -> bool:
    """Does the innermost frame match?"""
    return bool(frames) and any(fnmatch.fnmatch(frames[0].name, pattern) for pattern in patterns)


# ---- all of them ----


@dataclass(frozen=True)
class Finding:
    """What the report says, and what to do. rank: the stuck one, or None; where: its innermost frame."""

    text: str
    advice: str = ""
    rank: int | None = None
    where: str = ""


class Group:
    """The ranks of a run, with the missing ones.

    stacks: of every thread, by pid. stopped: pids that a signal has stopped.
    """

    def __init__(self, ranks: Sequence[Rank], stacks: Mapping[int, str] | None = None, stopped: Iterable[int] = ()):
        self.ranks = ranks
        self.stopped = set(stopped)
        self._frames = {r["rank"]: probe.frames((stacks or {}).get(r["pid"], "")) for r in ranks}

    def frames(self, rank: Rank) -> list[Frame]:
        """The frames of its main thread, innermost first; [] where there is no stack."""
        return self._frames[rank["rank"]]

    def caller(self, rank: Rank) -> str:
        """Its innermost frame outside of libraries, "" when not known."""
        own = (f for f in self.frames(rank) if not any(part in f.path for part in _LIBRARIES))
        return next(map(str, own), "")

    def waits(self, rank: Rank) -> bool:
        """Does this rank wait for others? By its stack; without one, because it says so."""
        frames = self.frames(rank)
        return _is(frames, _TABLE["waiting"]) if frames else _says_it_waits(rank)

    def culprit(self) -> Rank | None:
        """The rank that the others wait for; None where there is one rank only, or the evidence does not tell.

        In this order: the one that failed; is stopped; dead; not there; behind in steps; the only one that does not
        wait in a collective operation; of several of these the one that certainly does not, that is behind in check
        points, that saves, samples or validates while the others train, that has been silent longest.
        """
        if len(self.ranks) < 2:
            return None
        # Nobody waits for a rank that has finished, or that gave up waiting for the others.
        candidates = [r for r in self.ranks if r["outcome"] not in ENDED and BARRIER not in r["note"]]
        for sure in (
            [r for r in candidates if r["outcome"] in FAILED],
            [r for r in candidates if r["pid"] in self.stopped],
            [r for r in candidates if r["alive"] is False],
            [r for r in candidates if r["missing"]],
        ):
            if sure and len(sure) < len(self.ranks):
                return sure[0]
        behind = [r for r in candidates if r["step"] == min(other["step"] for other in candidates)]
        outside = [r for r in behind if not self.waits(r)]
        known = all(map(self.frames, outside))  # one without a stack may be anywhere
        certain = [r for r in outside if known and not _is(self.frames(r), _TABLE["maybe_waiting"])]
        for group in (behind, outside, certain, _fewest_points(outside), [r for r in outside if not _in_step(r)]):
            if len(group) == 1:
                return group[0]
        if not outside:
            return self._odd_one(behind)
        longest, second = sorted(outside, key=lambda r: r["silent_s"], reverse=True)[:2]
        return longest if longest["silent_s"] - second["silent_s"] > MIN_SILENCE_S else None

    def _odd_one(self, ranks: list[Rank]) -> Rank | None:
        """All wait: the one that passed fewer check points, or the only one that waits elsewhere than the others."""
        fewest = _fewest_points(ranks)
        if len(fewest) == 1:
            return fewest[0]
        places = [self.caller(r) for r in ranks]
        odd = [r for r, where in zip(ranks, places, strict=True) if places.count(where) == 1]
        return odd[0] if len(odd) == 1 and len(ranks) > 2 and all(places) else None

    def verdict(self, stuck: bool = True) -> Finding:
        """The report's sentence on these ranks and what to do. stuck: is the run known to be?"""
        going = [r for r in self.ranks if r["outcome"] == "running"] or self.ranks
        at = sorted({place(r) for r in going})
        if not going:
            return Finding("No rank has started.")
        if not stuck:
            return Finding(f"No sign of a hang: {_names(going)} at {_and(at)}.")
        late = self.culprit()
        one = late or going[0]
        said, advice = self._said(one)
        where = next(map(str, self.frames(one)), "")
        if late is not None:
            text = f"{said}{self._others(late)}{f' It is in {where}.' if where else ''}"
            return Finding(text, advice, late["rank"], where)
        if len(self.ranks) == 1:
            text = f"The training stopped at {at[0]}{f', in {where}' if where else ''}."
            return Finding(text, advice, one["rank"], where)
        if all(map(self.waits, going)):
            call = "".join(f" ({frame.function})" for frame in self.frames(one)[:1])
            text = f"wait in a collective operation{call} at {_and(at)}, and none of them is missing."
            return Finding(f"All {len(going)} ranks {text}", ADVICE["all_wait"])
        if len(at) == 1:
            return Finding(f"All {len(going)} ranks stopped at {at[0]}.", advice)
        each = "; ".join(f"rank {r['rank']}: {place(r)}" for r in going)
        text = f"The ranks stopped, and the evidence does not show which one first: {each}."
        return Finding(text, ADVICE["in_a_step"])

    def _said(self, rank: Rank) -> tuple[str, str]:
        """(`Rank 1 stopped at check point 4 (base model)`: the subject of the sentence, what to do)."""
        name, at, pid = f"Rank {rank['rank']}", place(rank), rank["pid"]
        if rank["outcome"] in FAILED:
            note = f": {rank['note'].rstrip('.')}" if rank["note"] else ""
            return f"{name} failed at {at}{note}", ADVICE["ended"]
        if rank["missing"]:
            return f"{name} has not started", ADVICE["missing"]
        if rank["alive"] is False:
            return f"The process of rank {rank['rank']} (pid {pid}) is gone; it was at {at}", ADVICE["ended"]
        if pid in self.stopped:
            return f"{name} (pid {pid}) is stopped by a signal at {at}", ADVICE["stopped"].format(pid=pid)
        if at_check_point(rank):
            return f"{name} stopped at {at}", ADVICE.get(rank["point"], "")
        return (f"{name} has not ended {at}", ADVICE["in_a_step"]) if _in_step(rank) else (f"{name} hangs: {at}", "")

    def _others(self, late: Rank) -> str:
        """` and never reached 5 (LoRA network), while ranks 0 and 2 wait for it in a barrier.`"""
        others = [r for r in self.ranks if r is not late]
        passed, furthest = {p["name"] for p in late["points"]}, max(others, key=lambda r: len(r["points"]))["points"]
        ahead = [p["name"] for p in sorted(furthest, key=lambda p: (p["at"], p["number"])) if p["name"] not in passed]
        begins = ahead and passed and at_check_point(late)
        never = f" and never reached the next one, {_numbered(ahead[0])}" if begins else ""
        done = [r for r in others if r["outcome"] in ENDED]
        waiting = [r for r in others if r not in done and self.waits(r)]
        rest = [r for r in others if r not in waiting and r not in done]
        clauses = (
            (waiting, "waits", "wait", f"for it{self._in_what(waiting)}"),
            (rest, "is", "are", f"at {_and(sorted({place(r) for r in rest}))}"),
            (done, "has", "have", "ended"),
        )
        parts = [f"{_names(who)} {one if len(who) == 1 else many} {what}" for who, one, many, what in clauses if who]
        return f"{never}{', while ' if never else '; '}{_and(parts)}."

    def _in_what(self, waiting: list[Rank]) -> str:
        """` in a barrier`, as their stacks show it; "" where there are none."""
        known = [frames for r in waiting if (frames := self.frames(r))]
        if any(frame.function == "init_process_group" for frames in known for frame in frames):
            return " to join the process group"
        barrier = all("barrier" in frames[0].function or "wait" in frames[0].function for frames in known)
        return f" in a {'barrier' if barrier else 'collective operation'}" if known else ""

    # ---- the report ----

    def lines(self, said: Finding) -> list[str]:
        """The report, a line each, without control characters; [] where no rank has recorded a check point."""
        if not any(r["points"] or r["missing"] for r in self.ranks):
            return []
        verdict = [said.text, *([said.advice] if said.advice else [])]
        parts = [verdict, table(self.ranks), self._positions(said), environment(self.ranks)]
        return [printable(line).rstrip() for part in parts for line in ([*part, ""] if part else [])][:-1]

    def _positions(self, said: Finding) -> list[str]:
        """Where each rank is, with its innermost frames: the stuck one first and in full, the others beside it."""
        out = [f"Where {count(len(self.ranks), 'rank')} {'is' if len(self.ranks) == 1 else 'are'}:"]
        for rank in sorted(self.ranks, key=lambda r: r["rank"] != said.rank):
            frames, is_stuck = self.frames(rank), rank["rank"] == said.rank
            state = "did not start" if rank["missing"] else f"at {place(rank)}"
            if rank["outcome"] != "running":
                state = f"{rank['outcome']}" + (f" ({rank['note']})" if rank["note"] else "")
            if rank["points"] and not rank["count"] and rank["point_ago_s"] is not None:
                state += f" for {duration(rank['point_ago_s'])}"
            if rank["outcome"] == "running" and rank["alive"] is False:
                state += ", its process is gone"
            waiting = ", waits for the others" if not is_stuck and self.waits(rank) else ""
            out.append(f"Rank {rank['rank']}: {state}{waiting}")
            if is_stuck:
                out += [f"    {frame.function} ({frame.path}:{frame.line})" for frame in frames[:DEPTH]]
            elif frames:
                inner, outer = str(frames[0]), self.caller(rank)
                out.append(f"    in {inner}" + (f", called by {outer}" if outer and outer != inner else ""))
            elif rank["outcome"] == "running" and not rank["missing"]:
                out.append("    no stack")
        return out


def _fewest_points(ranks: list[Rank]) -> list[Rank]:
    """Those that have passed the fewest check points."""
    return [r for r in ranks if len(r["points"]) == min(len(other["points"]) for other in ranks)]


def _names(ranks: Sequence[Rank]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {_and([str(r['rank']) for r in ranks])}"


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def slowest(ranks: Sequence[Rank]) -> dict[str, int]:
    """Check point -> the rank that spent longest in it, where that is more than half a second above the median.

    Of one rank: its slowest check point.
    """
    spent = [(p["name"], p["spent_s"], r["rank"]) for r in ranks for p in r["points"]]
    if len(ranks) == 1:
        return {name: rank for name, _, rank in sorted(spent, key=lambda one: one[1])[-1:]}
    found = {}
    for name in POINTS:
        took = sorted((spent_s, rank) for point, spent_s, rank in spent if point == name)
        if len(took) > 1 and took[-1][0] - took[(len(took) - 1) // 2][0] > MIN_SILENCE_S:
            found[name] = took[-1][1]
    return found


def table(ranks: Sequence[Rank]) -> list[str]:
    """Check point × rank: seconds spent in it; `-` never reached, `>` is there now, `*` the slowest rank."""
    slow = slowest(ranks)
    out = ["Seconds in each check point (> is there now, * the slowest, - never reached):"]
    out.append(f"{'':4}{'check point':{TITLE}}" + "".join(f"{'rank ' + str(r['rank']):>11}" for r in ranks))
    for number, (name, title) in enumerate(CHECK_POINTS.items(), 1):
        line = f"{number:2}  {title:{TITLE}}"
        for rank in ranks:
            spent = next((f"{p['spent_s']:.1f}" for p in rank["points"] if p["name"] == name), "")
            is_there = rank["point"] == name and rank["outcome"] == "running" and not rank["count"]
            cell = ">" * is_there + spent + "*" * (slow.get(name) == rank["rank"]) if spent else "-"
            line += f"{cell:>11}"
        out.append(line)
    return out


def environment(ranks: Sequence[Rank]) -> list[str]:
    """Device, backend and variables: once what all ranks share, then what differs."""
    values = {
        r["rank"]: {"host": r["host"], "device": r["device"] or "not known yet", "backend": r["backend"] or "none"}
        | r["environment"]
        for r in ranks
        if r["points"]
    }
    first: dict[str, Any] = next(iter(values.values()), {})
    shared = [fact for fact in first.items() if all(fact in own.items() for own in values.values())]
    out = ["Environment" + (" of all ranks:" if len(values) > 1 else ":")] if values else []
    out += [f"    {name}={value}" for name, value in shared]
    for number, own in values.items():
        differs = ", ".join(f"{name}={value}" for name, value in own.items() if (name, value) not in shared)
        out += [f"    rank {number}: {differs}"] if differs else []
    return out
