"""A run that is slow without being stuck: when that begins and ends, why, and the one change that may help.

Decision: a cause (a row of `slow.toml`) is what changed. The same amounts are added up over the slow steps and over
those at the usual pace, and a row asks for both: a quota that always throttles a container, or a power limit that the
GPU always reaches, explains nothing. Only time inside steps counts: what a sample, a save or a validation does to the
machine is no evidence.

Nothing here ends or delays a run. `Pace` decides that the steps are slow; a reading is taken every two seconds of
steps. A change of the run is made only where `[slow]` of config.toml allows it, once in a run: from a saved state, and
it is taken back if the steps are not faster.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from guards.reading import cgroups, read_text
from monitor import gpu
from monitor.attempt import Attempt
from monitor.detect.probe import DISK, NETWORK_DISK, Missing, ProcessSample, Sample, growths, take, waits_for
from monitor.detect.progress import MIN_STEPS, OVER, Pace, Watch
from monitor.ledger import amount
from monitor.phrases import duration
from monitor.process import platform
from monitor.process.platform import ProcessInfo
from monitor.process.spawned import Tree
from monitor.recovery import Run
from monitor.resume import next_attempt
from monitor.run_folder import read_json
from monitor.state import Observation, Verdict

TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("slow.toml").read_text(encoding="utf-8"))["cause"]
UNKNOWN = "unknown"
HOT, BRAKED = ("too hot", "hardware slowdown"), ("power brake",)
WORKS = 10  # percent of a GPU
Amounts = dict[str, tuple[float, float]]  # name -> (amount, seconds in which it came together)


@dataclass(frozen=True)
class Reading(Sample):
    """A sample with more counters at that moment, all of them only growing."""

    quotas: dict[str, tuple[int, int]] = field(default_factory=dict)  # cgroup -> (periods, of them throttled)
    busy_s: float = 0.0  # of all cores together
    waited_s: float = 0.0  # for the data loader


def read(tree: Tree, pid: int, waited_s: float, gpus: Iterable[dict[str, Any]]) -> Reading:
    """A reading now. pid: the training's process, whose cgroups count. Never raises, and waits for nothing."""
    sample = take(tree.keys(), Missing(), tuple(gpus))
    return Reading(**vars(sample), quotas=quotas(pid), busy_s=_busy_s(), waited_s=waited_s)


def quotas(pid: int) -> dict[str, tuple[int, int]]:
    """(periods, throttled periods) of each cgroup above the process that has a processor quota; {} off Linux."""
    found = {}
    for folder in cgroups(str(pid), "cpu"):
        values = dict(line.split(None, 1) for line in read_text(folder / "cpu.stat").splitlines() if " " in line)
        if periods := int(values.get("nr_periods", 0)):
            found[str(folder)] = periods, int(values.get("nr_throttled", 0))
    return found


def quota_cores(pid: int) -> float:
    """The smallest processor quota of the process's cgroups, in cores; 0.0 without one."""
    found = []
    for folder in cgroups(str(pid), "cpu"):
        words = read_text(folder / "cpu.max").split() or [
            read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max": no quota, and -1 likewise
            found += [cores] if (cores := int(words[0]) / int(words[1])) > 0 else []
    return min(found, default=0.0)


def _busy_s() -> float:
    """Processor seconds of the whole machine that were not idle; 0.0 where they cannot be read."""
    words = read_text(Path("/proc/stat")).partition("\n")[0].split()
    if not words:
        return 0.0
    used = [int(word) for word in words[1:9]]  # proc(5): user nice system idle iowait irq softirq steal
    return (sum(used) - used[3] - used[4]) / os.sysconf("SC_CLK_TCK")


def between(first: Reading, second: Reading, ours: Collection[int]) -> Amounts:
    """What happened between two readings of the same steps. ours: the pids of the run."""
    seconds, cpu_s = second.at_s - first.at_s, sum(growths(first, second, "cpu_s"))
    changes = [(b[0] - a[0], b[1] - a[1]) for path, b in second.quotas.items() if (a := first.quotas.get(path))]
    found = {
        "starved": max(growths(first, second, "starved_s"), default=0.0),
        "faults": float(sum(growths(first, second, "major_faults"))),
        "read_mb_s": sum(growths(first, second, "disk_bytes")) / 1e6,
        "blocked": seconds * any(map(_for_files, second.processes.values())),
        "swap": float(second.swapped_pages - first.swapped_pages),
        "loader": second.waited_s - first.waited_s,
        "others": max(0.0, second.busy_s - first.busy_s - cpu_s) / (os.cpu_count() or 1),
        "quota": seconds * max((throttled / periods for periods, throttled in changes if periods), default=0.0),
    }
    gpus = [_gpu(gpu, ours) for gpu in second.gpu]
    worst = max(gpus, key=lambda g: (g["hot"], g["foreign"], g["memory_share"]), default={})
    found |= {name: value * seconds for name, value in worst.items()}
    return {name: (value, seconds) for name, value in found.items()}


def _for_files(process: ProcessSample) -> bool:
    """Whether the process waits for a disk, a network file system or FUSE, or uninterruptibly for what is not known."""
    what = waits_for(process.wchan)
    return what == NETWORK_DISK or (process.state == "D" and what in (DISK, ""))


def _gpu(gpu: Mapping[str, Any], ours: Collection[int]) -> dict[str, float]:
    throttle, used = str(gpu.get("throttle", "")), int(gpu.get("memory_used") or 0)
    pids = set(gpu.get("pids", ()))
    others = pids - set(ours) if pids & set(ours) else set()  # a container sees numbers of the host: they say nothing
    found = {
        "spills": float(bool(gpu.get("spill"))),
        "hot": float(any(reason in throttle for reason in HOT)),
        "braked": float(any(reason in throttle for reason in BRAKED)),
        "memory_share": used / (gpu.get("memory_total") or 1),
        "foreign": float(len(others)),
        "foreign_use": float(max((gpu.get("use", {}).get(str(pid), 0) for pid in others), default=0)),
    }
    names = {"utilization": "gpu_use", "power_w": "power_w", "limit_w": "limit_w", "temperature": "temperature"}
    found |= {name: float(gpu[key]) for key, name in names.items() if isinstance(gpu.get(key), int | float)}
    if found.get("limit_w") and "power_w" in found:
        found["power_share"] = found["power_w"] / found["limit_w"]
    return found | ({"shared_gb": gpu["shared"] / 1e9} if isinstance(gpu.get("shared"), int) else {})


def add(amounts: Iterable[Amounts]) -> Amounts:
    """Their sum."""
    total: Amounts = {}
    for one in amounts:
        for name, (value, seconds) in one.items():
            old = total.get(name, (0.0, 0.0))
            total[name] = old[0] + value, old[1] + seconds
    return total


def figures(slow: Amounts, usual: Amounts) -> dict[str, float]:
    """Shares and rates over the slow time, and `more_X`, `power_fell`, `limit_fell` compared with the usual time.

    Without a usual time `more_X` is X, and nothing has fallen.
    """
    now, before = (
        {name: value / seconds for name, (value, seconds) in total.items() if seconds} for total in (slow, usual)
    )
    found = {**now, **{f"more_{name}": value - before.get(name, 0.0) for name, value in now.items()}}
    for name, fell in (("power_w", "power_fell"), ("limit_w", "limit_fell")):
        if before.get(name) and name in now:
            found[fell] = now[name] / before[name]
    if before:  # a program that was there at the usual pace is not what changed, unless it has begun to work
        found["foreign"] = max(found.get("more_foreign", 0.0), float(found.get("more_foreign_use", 0.0) >= WORKS))
    return found


def match(found: Mapping[str, float], alone: bool = False) -> dict[str, Any] | None:
    """The first row that holds; the last one always does. alone: of those that need no usual pace, or None."""
    for row in TABLE:
        above = all(found.get(name, -math.inf) > limit for name, limit in row.get("above", {}).items())
        below = all(found.get(name, math.inf) < limit for name, limit in row.get("below", {}).items())
        if above and below and (row.get("alone") or not alone):
            return row
    return None


def sentences(row: Mapping[str, Any], found: Mapping[str, float], names: Mapping[str, str]) -> dict[str, str]:
    """{"title", "explanation", "advice"} of a row with its figures; one that is not known reads "?"."""
    values: dict[str, Any] = defaultdict(lambda: math.nan, {**found, **names})
    texts = {key: row[key].format_map(values) for key in ("title", "explanation", "advice")}
    return {key: re.sub(r"\bnan\b", "?", text) for key, text in texts.items()}


def scan() -> dict[int, ProcessInfo]:
    """Every process of this machine; {} where they cannot be read."""
    return Missing().read("the list of processes", platform.scan) or {}


def busiest(before: Mapping[int, ProcessInfo], ours: Collection[int]) -> str:
    """The program that has used most processor time since `before` and is not of the run, as "name (pid 7)"."""
    now = {pid: p for pid, p in scan().items() if pid not in ours and pid != os.getpid()}
    used = {pid: p.cpu_s - old.cpu_s for pid, p in now.items() if (old := before.get(pid)) and old.start == p.start}
    most = max(used, key=lambda pid: used[pid], default=None)
    return program(most) if most is not None and used[most] > 0 else "short-lived programs"


def foreign(gpus: Iterable[Mapping[str, Any]], ours: Collection[int]) -> str:
    """The programs on these GPUs that are not of the run, by name, that with most use first."""
    use = {pid: gpu.get("use", {}).get(str(pid), 0) for gpu in gpus for pid in gpu.get("pids", ()) if pid not in ours}
    return " and ".join(program(pid) for pid in sorted(use, key=lambda pid: -use[pid])[:3]) or "another program"


def program(pid: int) -> str:
    """`blender (pid 7)`; `pid 7` where its name cannot be read."""
    with contextlib.suppress(OSError):
        if (found := platform.process_info(pid)) is not None:
            command = os.path.basename(platform.command_of(pid).split(" ")[0]) or found.name
            return f"{command[:60]} (pid {pid})"
    return f"pid {pid}"


# ---- a slow time of the run ----

EVERY_S = 2.0  # between two readings
MOST_S = 120.0  # of the slow time that its figures cover; at least a window
OLD_WINDOWS = 3  # amounts are those of the usual pace once they are this old
KEPT = 50  # of these
UNEXPLAINED_WINDOWS, UNEXPLAINED = 3, 3.0  # without a cause: so long, and so many times the usual step
GAIN = 0.8  # a change is kept if a step takes less than this share of before
REHEARSAL = "rehearsal.json"  # launch/rehearse.py
Changes = list[dict[str, str]]


class Slowdown:
    """Watches the pace of one run. `run.slow` is what is reported now, {} while the pace is the usual one:
    cause, title, explanation, advice, since (UTC), step_s, usual_s (None: unknown)."""

    def __init__(self, run: Run):
        self.run = run
        self._window_s = run.config.slow.window_s
        self._begin()

    def _begin(self, expected_s: float = 0.0) -> None:
        """Another process is watched, whose steps are expected to take so long (0.0: not known)."""
        self._pace = Pace(self._window_s, expected_s)
        self._reading: Reading | None = None
        self._pid = 0  # of the process whose pace it is
        self._visit = (0, -1.0)  # (pid, when the phase was entered) of `_reading`
        self._recent: deque[tuple[float, Amounts]] = deque()
        self._usual: deque[Amounts] = deque(maxlen=KEPT)
        self._since_s: float | None = None  # when the pace was found to be slow
        self._from_s = 0.0  # when its first slow step began
        self._before: dict[int, ProcessInfo] = {}  # all processes at that moment

    def attach(self) -> None:
        """Another attempt is watched: its pace is expected to be that of the last one, unless the run was changed."""
        self._report_over("the attempt ended")
        known = self.run.state.pace
        usual_s = amount(known.get("usual_s")) if known.get("changes", []) == self._names() else 0.0
        first = not usual_s and not self._names()
        self._begin(_rehearsed_s(self.run.folder.folder) if first else usual_s)

    def _names(self) -> list[str]:
        return [change["name"] for change in self.run.state.changes]

    def known(self) -> dict[str, Any]:
        """For a later monitor: {"usual_s", "changes", "tried": the change that was tried, "slow_s" before it}."""
        usual = {"usual_s": self._pace.usual_s, "changes": self._names()} if self._pace.usual_s else {}
        return {**self.run.state.pace, **usual}

    def text(self) -> str:
        """The slow time as a clause for a report; "" for none."""
        return f"{self.run.slow['title']}: {self.run.slow['explanation']}".rstrip(".") if self.run.slow else ""

    def poll(self, attempt: Attempt, view: Observation, watch: Watch, verdict: Verdict) -> Changes | None:
        """Take one look. Changes: the run is to be saved and restarted with these instead of those in force."""
        steps, watch.new_steps = watch.new_steps, []
        beat = min(view.beats, key=lambda b: b.rank, default=None)
        now_s = view.now_s
        if beat is None or beat.pid in view.stopped or verdict.reset:
            self._pace.window.clear()
            self._reading = None
            return None
        if self._pid and beat.pid != self._pid:  # another stage of the script: it has a pace of its own
            self._begin()
        self._pid = beat.pid
        in_step = beat.phase == "step" and beat.outcome == "running" and beat.count > 0
        under_way_s = now_s - max(beat.step_s, beat.phase_s) if in_step else 0.0
        said = self._pace.observe(steps, under_way_s)
        if said == OVER:
            self._since_s = None
            self._report_over(f"a step takes {self._pace.usual_s:.2g} s again")
        elif self._pace.slow and self._since_s is None:
            self._since_s, self._before = now_s, scan()
            self._from_s = now_s - max(self._window_s, sum(self._pace.window) + under_way_s)
        if in_step and self._read(attempt, (beat.pid, beat.phase_s), beat.waited_s, now_s):
            self._explain(attempt, beat.step, under_way_s, now_s)
        without = self._tried(under_way_s)
        return without if without is not None or not (self.run.slow and steps) else self._change()

    def _read(self, attempt: Attempt, visit: tuple[int, float], waited_s: float, now_s: float) -> bool:
        """Take a reading, if it is time; True when there is one more pair."""
        last = self._reading
        if last is not None and self._visit == visit and now_s - last.at_s < EVERY_S:
            return False
        gpus = gpu.own(self.run.gpus.read(), self.run.queue.devices)
        self._reading = new = read(attempt.tree, visit[0], waited_s, gpus)
        same, self._visit = self._visit == visit, visit
        if last is None or not same:
            return False
        self._recent.append((new.at_s, between(last, new, attempt.tree.members.keys())))
        keep_s = max(OLD_WINDOWS * self._window_s, sum(self._pace.window) + self._window_s)
        while self._recent[0][0] < new.at_s - keep_s or len(self._recent) > 2000:
            amounts = self._recent.popleft()[1]
            if not self._pace.slow:
                self._usual.append(amounts)
        return True

    def _explain(self, attempt: Attempt, step: int, under_way_s: float, now_s: float) -> None:
        """Report a slow time once its cause is known, or has stayed unknown for long; end one that needs no pace."""
        from_s = now_s - self._window_s if self._since_s is None else self._from_s
        late = [amounts for at_s, amounts in self._recent if at_s >= max(from_s, now_s - MOST_S)]
        early = [amounts for at_s, amounts in self._recent if at_s < from_s]
        found = figures(add(late), add([*early, *self._usual]))  # of the slow time, compared with what was before it
        alone = match(found, alone=True)
        if self._since_s is None:
            if alone is None:
                self._report_over("its cause has passed")
            long = self._recent[-1][0] - self._recent[0][0] >= self._window_s
            row = alone if long and not self.run.slow else None
        elif now_s - self._since_s < EVERY_S:
            return  # what the other programs do is measured from the beginning of the slow time
        else:
            row = alone or match(found) or TABLE[-1]
            if row["name"] == UNKNOWN:
                long = now_s - self._since_s >= UNEXPLAINED_WINDOWS * self._window_s
                longer = self._pace.own and self._pace.now_s(under_way_s) >= UNEXPLAINED * self._pace.usual_s
                row = row if long and longer and not self.run.slow else None
            elif self.run.slow and self.run.slow["cause"] != UNKNOWN:
                row = None
        if row is not None:
            self._report(attempt, row, found, step, under_way_s)

    def _report(
        self, attempt: Attempt, row: dict[str, Any], figures: dict[str, float], step: int, under_way_s: float
    ) -> None:
        ours = attempt.tree.members.keys()
        gpus = self._reading.gpu if self._reading is not None else ()
        names = {
            "foreign_name": foreign(gpus, ours),
            "throttle": next((g["throttle"] for g in gpus if g.get("throttle")), ""),
            "busiest": busiest(self._before, ours),
        }
        known = sentences(row, {**figures, "quota_cores": quota_cores(self._visit[0])}, names)
        step_s = self._pace.now_s(under_way_s)
        usual_s = round(self._pace.usual_s, 3) if self._since_s is not None else None
        pace = f"A step takes {step_s:.2g} s" + (f" instead of {usual_s:.2g} s" if usual_s else "")
        self.run.slow = {
            "cause": row["name"], **known, "ladder": row.get("ladder", []), "since": platform.now().utc, "step": step,
            "step_s": round(step_s, 3), "usual_s": usual_s, "pace": pace,
        }  # fmt: skip
        rounded = {name: round(value, 3) for name, value in sorted(figures.items())}
        message = f"{known['title']}. {pace}. {known['explanation']} {known['advice']}"
        self.run.folder.event("slowdown", message, cause=row["name"], step=step, step_s=step_s, figures=rounded)

    def _report_over(self, why: str) -> None:
        """Report the end of a slow time, if one was reported."""
        if not self.run.slow:
            return
        lost_s = self._pace.lost_s
        lost = f"; {duration(lost_s)} were lost" if lost_s >= 1 else ""
        self.run.folder.event("slowdown_over", f"{why}{lost}", cause=self.run.slow["cause"], lost_s=round(lost_s, 1))
        self.run.slow = {}

    def _change(self) -> Changes | None:
        """The changes with one more that helps against this cause; None where none is allowed or left."""
        run, known, changes = self.run, self.run.state.pace, self.run.state.changes
        if not run.config.slow.changes_count or known.get("tried") or run.several or not run.slow["ladder"]:
            return None
        change = next_attempt.next_change(run, run.slow["ladder"])
        known |= {"tried": change.get("name") or "none", "slow_s": run.slow["step_s"]}
        if not change:
            return None
        patch = {name: value for name, value in change["patch"].items() if name != "spec"}
        run.folder.event("mitigated", change["sentence"], change=change["name"], patch=patch)
        return [*changes, change]

    def _tried(self, under_way_s: float) -> Changes | None:
        """Judge the change that was tried, once enough steps are known; the changes without it if it did not help."""
        known = self.run.state.pace
        before_s, tried = amount(known.get("slow_s")), known.get("tried")
        if not before_s or tried not in self._names() or len(self._pace.window) < MIN_STEPS:
            return None
        step_s = self._pace.now_s(under_way_s)
        takes = f"a step takes {step_s:.2g} s"
        known.pop("slow_s")
        if step_s < GAIN * before_s:
            self.run.folder.event("slowdown_over", f"{takes} instead of {before_s:.2g} s since the change", cause="")
            return None
        self.run.folder.event("reverted", f"the change is taken back: {takes} with it, {before_s:.2g} s without")
        return [change for change in self.run.state.changes if change["name"] != tried]


def _rehearsed_s(folder: Path) -> float:
    """Seconds of a step as the rehearsal of this run measured them; 0.0 without one, or after a change of the run."""
    rehearsal = folder / REHEARSAL
    try:
        if (folder / "run.toml").stat().st_mtime > rehearsal.stat().st_mtime:
            return 0.0
        return amount((read_json(rehearsal) or {})["measured"]["step_s"])
    except (OSError, LookupError, TypeError):
        return 0.0
