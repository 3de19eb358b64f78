"""The rank report as text: verdict, rank × check point, stacks side by side, environment.

One text serves the terminal and, indented as a block of code, the incident's report. When each check point was reached
is in the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

from guards import startup
from monitor.detect import stacks as dumps
from monitor.diagnose.ranks import Rank, Verdict, caller, frames, place, slowest, waits
from monitor.phrases import count, duration, printable

COLUMNS = 8  # ranks side by side
DEPTH = 8  # frames of the stuck rank
TITLE = max(map(len, startup.CHECK_POINTS.values()))
NEVER, CURRENT, SLOWEST = "-", ">", "*"


def lines(ranks: list[Rank], said: Verdict, stacks: Mapping[int, str]) -> list[str]:
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


def positions(ranks: list[Rank], said: Verdict, stacks: Mapping[int, str]) -> list[str]:
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
