"""Which rank is stuck, and where: a pure decision over the ranks' records, their main threads' stacks and their states.

Decision: the rank that others wait for is never one that waits itself. A rank waits when the innermost frame of its
main thread belongs to a collective operation; a frame further out is not enough, because a rank can hang inside of one.
Only then do the counters decide: steps, check points, phases, and last how long each has been silent. Where the
evidence does not tell, nobody is accused.

A rank is a dictionary, as `facts` makes it of a heartbeat: it is stored in the incident, and goes from node to node.
`lines` is the report as text, for the terminal and, as a block of code, for the incident's report.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from guards import startup
from guards.heartbeat import WAITS, Beat
from monitor.detect import stacks as dumps
from monitor.phrases import PHASES, count, duration, printable

Rank = dict[str, Any]
COLUMNS = 8  # ranks side by side
DEPTH = 8  # frames of the stuck rank
TITLE = max(map(len, startup.CHECK_POINTS.values()))
NEVER, CURRENT, SLOWEST = "-", ">", "*"

BARRIER = "ranks at a barrier"  # in the note of a rank whose deadline expired while it waited for the others
STEPS = ("first_step", "step")
FAILED = ("failed", "deadline")  # outcomes
MIN_SILENCE_S = 0.5  # one rank must be silent this much longer than the others to be the one that they wait for
WAITING = ("distributed_c10d.py:*", "c10d_logger.py:*", "rendezvous.py:*", "*:wait_for_everyone", "*:barrier",
           "*:all_reduce", "*:all_gather*", "*:broadcast*")  # fmt: skip
"""Innermost frames of a rank that waits for the others."""
MAYBE_WAITING = ("graph.py:_engine_run_backward", "*:synchronize")
"""Innermost frames behind which native code computes, or waits for the others' gradients."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python")
ADVICE = {
    "arguments": "Check the disk of the Python environment: imports read thousands of files from it.",
    "folders": "Check that the run's folder can be read and written; use a local disk.",
    "tokenizer": "Check the connection to the model hub, or download the model first and set HF_HUB_OFFLINE=1.",
    "model": "Check the disk that holds the base model, and that enough memory is free.",
    "network": "Check that enough memory is free, and the settings of the LoRA network.",
    "data": "Check the disk that holds the images and their caches; copy them to a local disk.",
    "accelerator": "Check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES, and that each rank reaches MASTER_ADDR.",
    "tracker": "Turn the tracker off, or set WANDB_MODE=offline.",
    "loader": "Use 0 data loader workers.",
    "ready": "Resume from an older checkpoint, and do not draw sample images at the start.",
    "first_step": "Use 0 data loader workers; with several GPUs try NCCL_P2P_DISABLE=1.",
    "finished": "Check the disk that the LoRA is written to, and turn the tracker off.",
}
_NETWORK = (
    "Check the network between the ranks: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, a firewall, NCCL_P2P_DISABLE=1."
)
_STEP_ADVICE = "The stack shows what it waits for. Use 0 data loader workers if it waits for a batch."


def facts(beat: Beat, now_s: float, utc: Callable[[float], str], alive: bool | None) -> Rank:
    """What the report keeps of a rank's record. now_s: monotonic. utc: the UTC of a monotonic time. alive: None, unknown."""
    about = startup.read_about(beat.about)
    kept = "rank world local_rank pid phase step planned done total note outcome point count"
    points = []
    for i, (name, at_s) in enumerate(zip(startup.NAMES, beat.reached, strict=False)):
        if at_s:
            current = beat.outcome == "running" and name == beat.point and not (beat.count and beat.phase in STEPS)
            spent_s = beat.spent[i] + (now_s - beat.point_s if current else 0.0)
            points.append({
                "number": i + 1, "name": name, "at": utc(at_s), "elapsed_s": round(at_s - beat.started_s, 6),
                "spent_s": round(spent_s, 3),
            })  # fmt: skip
    return {
        **{name: getattr(beat, name) for name in kept.split()},
        "silent_s": round(now_s - beat.beat_s, 2),
        "point_ago_s": round(now_s - beat.point_s, 2) if beat.point else None,
        "points": points,
        "host": str(about.get("host", "")),
        "device": str(about.get("device", "")),
        "backend": str(about.get("backend", "")),
        "environment": about.get("environment") or {},
        "alive": alive,
    }


def missing(ranks: list[Rank]) -> list[Rank]:
    """The ranks that should be there and have no record, in the shape of `facts`.

    Where the others' records are known from this machine only, ranks of other machines are not missing.
    """
    if not ranks:
        return []
    world = max(r.get("world", 1) for r in ranks)
    known, hosts = {r["rank"] for r in ranks}, {r.get("host", "") for r in ranks}
    expected: set[int] = set()
    for rank in ranks:
        local_world = str(rank.get("environment", {}).get("LOCAL_WORLD_SIZE", ""))
        first = rank["rank"] - rank.get("local_rank", 0)
        expected |= set(range(first, first + int(local_world))) if local_world.isdecimal() else set()
    if len(hosts) > 1 or not expected:
        expected = set(range(world))
    return [
        {
            "rank": number, "world": world, "local_rank": None, "pid": 0, "phase": "import", "step": 0, "planned": 0,
            "done": 0, "total": 0, "note": "", "outcome": "running", "point": "", "count": 0, "silent_s": 0.0,
            "point_ago_s": None, "points": [], "host": "", "device": "", "backend": "", "environment": {}, "alive": None,
            "missing": True,
        }
        for number in sorted(expected - known)
    ]  # fmt: skip


def frames(rank: Rank, stacks: Mapping[int, str]) -> list[str]:
    """`file.py:function` of the frames of its main thread, innermost first; [] where there is no stack."""
    return dumps.names(dumps.main_thread(stacks.get(rank["pid"], "")))


def _matches(names: list[str], patterns: Iterable[str]) -> bool:
    return bool(names) and any(fnmatch.fnmatch(names[0], pattern) for pattern in patterns)


def waits(rank: Rank, stacks: Mapping[int, str]) -> bool:
    """Does this rank wait for others? By its stack; without one, because it says so."""
    names = frames(rank, stacks)
    return _matches(names, WAITING) if names else _says_it_waits(rank)


def _says_it_waits(rank: Rank) -> bool:
    return bool(rank["note"].startswith(WAITS)) and rank["phase"] != "step"  # a step leaves the note of before in place


def _in_step(rank: Rank) -> bool:
    """Is it in a step? One that waits for a save of rank 0 has begun its next step."""
    return rank["phase"] in STEPS or _says_it_waits(rank)


def culprit(ranks: list[Rank], stacks: Mapping[int, str], stopped: Iterable[int] = ()) -> Rank | None:
    """The rank that the others wait for; None where there is one rank only, or the evidence does not tell.

    stopped: pids that a signal has stopped. In this order: the one that failed; is stopped; dead; not there; behind in
    steps; the only one that does not wait in a collective operation; of several of these the one that certainly does
    not, that is behind in check points, that saves, samples or validates while the others train, that has been silent
    longest.
    """
    if len(ranks) < 2:
        return None
    # Nobody waits for a rank that has finished, or that gave up waiting for the others.
    candidates = [r for r in ranks if r["outcome"] not in ("done", "stopped") and BARRIER not in r["note"]]
    halted = set(stopped)
    for sure in (
        [r for r in candidates if r["outcome"] in FAILED],
        [r for r in candidates if r["pid"] in halted],
        [r for r in candidates if r.get("alive") is False],
        [r for r in candidates if r.get("missing")],
    ):
        if sure and len(sure) < len(ranks):
            return sure[0]
    behind = [r for r in candidates if r["step"] == min(other["step"] for other in candidates)]
    outside = [r for r in behind if not waits(r, stacks)]
    known = all(frames(r, stacks) for r in outside)  # one without a stack may be anywhere
    certain = [r for r in outside if known and not _matches(frames(r, stacks), MAYBE_WAITING)]
    least = min((len(r.get("points", ())) for r in outside), default=0)
    slower = [r for r in outside if len(r.get("points", ())) == least]
    for group in (behind, outside, certain, slower, [r for r in outside if not _in_step(r)]):
        if len(group) == 1:
            return group[0]
    if not outside:
        return _odd_one(behind, stacks)
    longest, second = sorted(outside, key=lambda r: r["silent_s"], reverse=True)[:2]
    return longest if longest["silent_s"] - second["silent_s"] > MIN_SILENCE_S else None


def _odd_one(ranks: list[Rank], stacks: Mapping[int, str]) -> Rank | None:
    """All wait: the one that passed fewer check points, or the only one that waits somewhere else than all the others."""
    passed = [len(r.get("points", ())) for r in ranks]
    if passed.count(min(passed, default=0)) == 1 and len(ranks) > 1:
        return ranks[passed.index(min(passed))]
    places = [caller(r, stacks) for r in ranks]
    odd = [r for r, place in zip(ranks, places, strict=True) if places.count(place) == 1]
    return odd[0] if len(odd) == 1 and len(ranks) > 2 and all(places) else None


def caller(rank: Rank, stacks: Mapping[int, str]) -> str:
    """`function (file.py:line)` of its innermost frame outside of libraries, "" when not known."""
    for function, file, line in dumps.places(dumps.main_thread(stacks.get(rank["pid"], ""))):
        if not any(part in file for part in _LIBRARIES):
            return f"{function} ({file.rpartition('/')[2]}:{line})"
    return ""


def starting(rank: Rank) -> bool:
    """Has it not completed a step yet in this process, and not gone on to the end?"""
    return bool(rank.get("points") or rank.get("missing")) and not rank.get("count") and rank.get("point") != "finished"


def place(rank: Rank) -> str:
    """`check point 4 (base model)` while it starts or ends, else `step 91` or `saving a checkpoint after step 90`."""
    if rank.get("missing"):
        return "before check point 1"
    if (name := _point(rank)) or starting(rank):
        return f"check point {startup.number(name)} ({startup.CHECK_POINTS[name]})" if name else "before check point 1"
    if _in_step(rank):
        return f"step {rank['step'] + 1}"
    return str(PHASES.get(rank["phase"], rank["phase"])) + (f" after step {rank['step']}" if rank["step"] else "")


@dataclass(frozen=True)
class Finding:
    """What the report says. kind: one of "rank", "all", "collective", "one", "progress"; rank: the stuck one, or None.

    point: the check point that it is at, "" once it trains. step: completed by it. where: its innermost frame.
    """

    kind: str
    text: str
    advice: str = ""
    rank: int | None = None
    point: str = ""
    number: int = 0
    step: int = 0
    phase: str = ""
    where: str = ""


def verdict(ranks: list[Rank], stacks: Mapping[int, str], stopped: Iterable[int] = (), stuck: bool = True) -> Finding:
    """The report's sentence on these ranks (with the missing ones) and what to do. stuck: is the run known to be?"""
    late, going = culprit(ranks, stacks, stopped), [r for r in ranks if r["outcome"] == "running"] or ranks
    at = sorted({place(r) for r in going})
    if not stuck or not ranks:
        text = f"No sign of a hang: {_names(going)} at {_and(at)}." if at else "No rank has started."
        return Finding("progress", text)
    one, several = late or going[0], f"All {len(going)} ranks"
    where, point = dumps.where(stacks.get(one["pid"], "")), _point(one)
    said, advice = _said(one, one["pid"] in set(stopped))
    number = startup.number(point) if point else 0
    found = Finding("rank", said, advice, one["rank"], point, number, one["step"], one["phase"], where)
    if late is not None:
        others = _others(late, [r for r in ranks if r is not late], stacks)
        return replace(found, text=f"{said}{others}{f' It is in {where}.' if where else ''}")
    if len(ranks) == 1:
        return replace(found, kind="one", text=f"The training stopped at {at[0]}{f', in {where}' if where else ''}.")
    if all(waits(r, stacks) for r in going):
        name = f" ({call[0].partition(':')[2]})" if (call := frames(one, stacks)) else ""
        text = f"{several} wait in a collective operation{name} at {_and(at)}, and none of them is missing."
        return replace(found, kind="collective", text=text, advice=_NETWORK, rank=None)
    if len(at) == 1:
        return replace(found, kind="all", text=f"{several} stopped at {at[0]}.", rank=None)
    each = "; ".join(f"rank {r['rank']}: {place(r)}" for r in going)
    return Finding("all", f"The ranks stopped, and the evidence does not show which one first: {each}.", _STEP_ADVICE)


def _point(rank: Rank) -> str:
    """The check point that a rank is at, "" once it trains."""
    return str(rank["point"]) if starting(rank) or rank.get("point") == "finished" else ""


def _said(rank: Rank, halted: bool) -> tuple[str, str]:
    """(`Rank 1 stopped at check point 4 (base model)`: the subject of the sentence, what to do)."""
    name, at, pid, point = f"Rank {rank['rank']}", place(rank), rank["pid"], _point(rank)
    log = "The log or the kernel's log says why it ended."
    if rank["outcome"] in FAILED:
        return f"{name} failed at {at}" + (f": {rank['note'].rstrip('.')}" if rank["note"] else ""), log
    if rank.get("missing"):
        launcher = "Check the launcher's output, and on several machines that the script runs on each of them."
        return f"{name} has not started", launcher
    if rank.get("alive") is False:
        return f"The process of rank {rank['rank']} (pid {pid}) is gone; it was at {at}", log
    if halted:
        how = f"Something stopped it with a signal (job control, a debugger): kill -CONT {pid}."
        return f"{name} (pid {pid}) is stopped by a signal at {at}", how
    if point or starting(rank):
        return f"{name} stopped at {at}", ADVICE.get(point, "")
    return (f"{name} has not ended {at}", _STEP_ADVICE) if _in_step(rank) else (f"{name} hangs: {at}", "")


def _others(late: Rank, others: list[Rank], stacks: Mapping[int, str]) -> str:
    """` and never reached 5 (LoRA network), while ranks 0 and 2 wait for it in a barrier.`"""
    ahead = [name for name in _order(others) if name not in {p["name"] for p in late.get("points", ())}]
    never = ""
    if ahead and starting(late) and late.get("points"):
        never = f" and never reached the next one, {startup.number(ahead[0])} ({startup.CHECK_POINTS[ahead[0]]})"
    done = [r for r in others if r["outcome"] in ("done", "stopped")]
    waiting = [r for r in others if r not in done and waits(r, stacks)]
    parts = []
    if waiting:
        parts.append(f"{_names(waiting)} wait{'s' * (len(waiting) == 1)} for it{_in_what(waiting, stacks)}")
    if rest := [r for r in others if r not in waiting and r not in done]:
        at = _and(sorted({place(r) for r in rest}))
        parts.append(f"{_names(rest)} {'is' if len(rest) == 1 else 'are'} at {at}")
    if done:
        parts.append(f"{_names(done)} {'has' if len(done) == 1 else 'have'} ended")
    return f"{never}{', while ' if never else '; '}{_and(parts)}." if parts else "."


def _in_what(waiting: list[Rank], stacks: Mapping[int, str]) -> str:
    """` in a barrier`, as their stacks show it; "" where there are none."""
    every = [frames(r, stacks) for r in waiting if frames(r, stacks)]
    if not every:
        return ""
    if any(name.endswith(":init_process_group") for names in every for name in names):
        return " to join the process group"
    calls = {names[0].partition(":")[2] for names in every}
    return " in a barrier" if all("barrier" in c or "wait" in c for c in calls) else " in a collective operation"


def _order(ranks: list[Rank]) -> list[str]:
    """The check points in the order in which the rank that reached most of them passed them."""
    most = max(ranks, key=lambda r: len(r.get("points", ())), default=None)
    points = most.get("points", ()) if most else ()
    return [p["name"] for p in sorted(points, key=lambda p: (p["at"], p["number"]))]


def _names(ranks: list[Rank]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`."""
    numbers = [str(r["rank"]) for r in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {_and(numbers)}"


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def slowest(ranks: list[Rank]) -> dict[str, int]:
    """Check point -> the rank that spent longest in it, where that is more than half a second above the median.

    Of one rank: its slowest check point.
    """
    if len(ranks) == 1:
        points = ranks[0].get("points", ())
        return {max(points, key=lambda p: p["spent_s"])["name"]: ranks[0]["rank"]} if points else {}
    found = {}
    for name in startup.NAMES:
        took = sorted((p["spent_s"], r["rank"]) for r in ranks for p in r.get("points", ()) if p["name"] == name)
        if len(took) > 1 and took[-1][0] - took[(len(took) - 1) // 2][0] > MIN_SILENCE_S:
            found[name] = took[-1][1]
    return found


def as_json(ranks: list[Rank], said: Finding) -> dict[str, Any]:
    """The report for programs: {"verdict", "ranks", "check_points", "slowest"}; every value can be written as JSON."""
    return {
        "verdict": dict(vars(said)),
        "ranks": ranks,
        "check_points": startup.CHECK_POINTS,
        "slowest": slowest(ranks),
    }


# ---- the report as text ----


def lines(ranks: list[Rank], said: Finding, stacks: Mapping[int, str]) -> list[str]:
    """The report, a line each, without control characters; [] where no rank has recorded a check point."""
    if not any(r.get("points") or r.get("missing") for r in ranks):
        return []
    parts = [
        [said.text, *([said.advice] if said.advice else [])],
        table(ranks),
        positions(ranks, said, stacks),
        environment(ranks),
    ]
    return [printable(line).rstrip() for part in parts for line in ([*part, ""] if part else [])][:-1]


def table(ranks: list[Rank]) -> list[str]:
    """Check point × rank: seconds spent in it; `-` never reached, `>` is there now, `*` the slowest rank."""
    slow = slowest(ranks)
    out = ["Seconds in each check point (> is there now, * the slowest, - never reached):"]
    for first in range(0, len(ranks), COLUMNS):
        some = ranks[first : first + COLUMNS]
        out.append(f"{'':4}{'check point':{TITLE}}" + "".join(f"{'rank ' + str(r['rank']):>11}" for r in some))
        for number, (name, title) in enumerate(startup.CHECK_POINTS.items(), 1):
            cells = (_cell(r, name, slow.get(name) == r["rank"]) for r in some)
            out.append(f"{number:2}  {title:{TITLE}}" + "".join(f"{cell:>11}" for cell in cells))
    return out


def _cell(rank: Rank, name: str, is_slowest: bool) -> str:
    spent_s = next((p["spent_s"] for p in rank.get("points", ()) if p["name"] == name), None)
    if spent_s is None:
        return NEVER
    current = CURRENT if rank["point"] == name and rank["outcome"] == "running" and not rank.get("count") else ""
    return f"{current}{spent_s:.1f}{SLOWEST if is_slowest else ''}"


def positions(ranks: list[Rank], said: Finding, stacks: Mapping[int, str]) -> list[str]:
    """Where each rank is, with its innermost frames: the stuck one first and in full, the others beside it."""
    out = []
    for rank in sorted(ranks, key=lambda r: r["rank"] != said.rank):
        state = "did not start" if rank.get("missing") else f"at {place(rank)}"
        if rank["outcome"] not in ("running", ""):
            state = f"{rank['outcome']}" + (f" ({rank['note']})" if rank["note"] else "")
        elif rank.get("alive") is False:
            state += ", its process is gone"
        ago_s = rank.get("point_ago_s") if rank.get("points") and not rank.get("count") else None
        since = f" for {duration(ago_s)}" if ago_s is not None else ""
        waiting = ", waits for the others" if rank["rank"] != said.rank and waits(rank, stacks) else ""
        out.append(f"Rank {rank['rank']}: {state}{since}{waiting}")
        main = dumps.places(dumps.main_thread(stacks.get(rank["pid"], "")))
        if rank["rank"] == said.rank:
            out += [f"    {function} ({file}:{line})" for function, file, line in main[:DEPTH]]
        elif main:
            inner, outer = dumps.where(stacks[rank["pid"]]), caller(rank, stacks)
            out.append(f"    in {inner}" + (f", called by {outer}" if outer and outer != inner else ""))
        elif frames(rank, stacks) == [] and not rank.get("missing") and rank["outcome"] == "running":
            out.append("    no stack")
    return [f"Where {count(len(ranks), 'rank')} {'is' if len(ranks) == 1 else 'are'}:", *out]


def environment(ranks: list[Rank]) -> list[str]:
    """Device, backend and variables: once what all ranks share, then what differs."""
    known = [r for r in ranks if not r.get("missing") and r.get("points")]
    if not known:
        return []
    values = {r["rank"]: _variables(r) for r in known}
    first, *rest = values.values()
    shared = {name: value for name, value in first.items() if all(other.get(name) == value for other in rest)}
    out = ["Environment" + (" of all ranks:" if rest else ":"), *(f"    {n}={v}" for n, v in shared.items())]
    for number, own in values.items():
        differs = ", ".join(f"{name}={value}" for name, value in own.items() if name not in shared)
        out += [f"    rank {number}: {differs}"] if differs else []
    return out


def _variables(rank: Rank) -> dict[str, str]:
    facts = {"host": rank["host"], "device": rank["device"] or "not known yet", "backend": rank["backend"] or "none"}
    return facts | {str(name): str(value) for name, value in rank["environment"].items()}
