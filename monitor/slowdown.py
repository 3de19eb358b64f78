"""A run that is slow without being stuck: when it begins and ends, why, and the one change that may help.

Decision: nothing here ends or delays a run. `detect/pace.py` decides that the steps are slow, `diagnose/slow.py` names
the cause from what the machine did meanwhile, and this file collects both, once every two seconds of steps. A change of
the run is made only where `[slow]` of config.toml allows it, once in a run: from a saved state, and it is taken back if
the steps are not faster.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from monitor.attempt import Attempt
from monitor.detect.pace import MIN_STEPS, OVER, Pace
from monitor.detect.progress import Observation, Verdict, Watch
from monitor.diagnose import slow
from monitor.diagnose.slow import Amounts, Reading
from monitor.gpu import nvml
from monitor.phrases import duration
from monitor.process import platform
from monitor.process.platform import ProcessInfo
from monitor.resume import script
from monitor.run_folder import MonitorError, read_json
from monitor.start import Run

EVERY_S = 2.0  # between two readings
MOST_S = 120.0  # of the slow time that its figures cover; at least a window
OLD_WINDOWS = 3  # amounts are those of the usual pace once they are this old
FADE = 0.98  # what the usual amounts keep at each reading
UNEXPLAINED_WINDOWS, UNEXPLAINED = 3, 3.0  # without a cause: so long, and so many times the usual step
GAIN = 0.8  # a change is kept if a step takes less than this share of before
REHEARSAL = "rehearsal.json"  # launch/rehearse.py
Changes = list[dict[str, str]]


class Slowdown:
    """Watches the pace of one run. `found` is what is reported now, in status.json too, {} while the pace is the usual one:
    cause, title, explanation, advice, since (UTC), step_s, usual_s (None: unknown)."""

    def __init__(self, run: Run):
        self.run = run
        self.found: dict[str, Any] = {}
        self._window_s = run.config.slow.window_s
        self._pace = Pace(self._window_s)
        self._known: dict[str, Any] | None = None  # of `known`, from the first attempt on
        self._begin()

    def _begin(self) -> None:
        self._reading: Reading | None = None
        self._pid = 0  # of the process whose pace it is
        self._visit = (0, -1.0)  # (pid, when the phase was entered) of `_reading`
        self._recent: deque[tuple[float, Amounts]] = deque()
        self._usual: Amounts = {}
        self._since_s: float | None = None  # when the pace was found to be slow
        self._from_s = 0.0  # when its first slow step began
        self._before: dict[int, ProcessInfo] = {}  # all processes at that moment

    def attach(self) -> None:
        """Another attempt is watched: its pace is expected to be that of the last one, unless the run was changed."""
        self._report_over("the attempt ended")
        self._known = dict(self.run.state.pace)
        same = self._known.get("changes", []) == self._names()
        usual_s = float(self._known.get("usual_s", 0.0)) if same else 0.0
        first = not usual_s and not self._names()
        self._pace = Pace(self._window_s, _rehearsed_s(self.run.folder.folder) if first else usual_s)
        self._begin()

    def _names(self) -> list[str]:
        return [change["name"] for change in self.run.state.changes]

    def known(self) -> dict[str, Any]:
        """What a later monitor needs: {"usual_s", "changes", "tried": the change that was tried, "slow_s" before it}."""
        usual = {"usual_s": self._pace.usual_s, "changes": self._names()} if self._pace.usual_s else {}
        return {**(self.run.state.pace if self._known is None else self._known), **usual}

    def text(self) -> str:
        """The slow time as a clause for a report; "" for none."""
        return f"{self.found['title']}: {self.found['explanation']}".rstrip(".") if self.found else ""

    def poll(self, attempt: Attempt, view: Observation, watch: Watch, verdict: Verdict) -> Changes | None:
        """Take one look. Changes: the run is to be saved and restarted with these instead of those in force."""
        steps, watch.new_steps = watch.new_steps, []
        beat = min(view.beats, key=lambda b: b.rank, default=None)
        now_s = view.now_s
        if beat is None or beat.pid in view.stopped or verdict.reset:
            self._pace.forget()
            self._reading = None
            return None
        if self._pid and beat.pid != self._pid:  # another stage of the script: it has a pace of its own
            self._pace = Pace(self._window_s)
            self._begin()
        self._pid = beat.pid
        in_step = beat.phase == "step" and beat.outcome == "running" and beat.count > 0
        under_way_s = now_s - max(beat.step_s, beat.phase_s) if in_step else 0.0
        said = self._pace.observe(steps, under_way_s)
        if said == OVER:
            self._since_s = None
            self._report_over(f"a step takes {self._pace.usual_s:.2g} s again")
        elif self._pace.slow and self._since_s is None:
            self._since_s, self._before = now_s, slow.scan()
            self._from_s = now_s - max(self._window_s, self._pace.window_s + under_way_s)
        if in_step and self._read(attempt, (beat.pid, beat.phase_s), beat.waited_s, now_s):
            self._explain(attempt, beat.step, under_way_s, now_s)
        without = self._tried(under_way_s)
        return without if without is not None or not (self.found and steps) else self._change()

    def _read(self, attempt: Attempt, visit: tuple[int, float], waited_s: float, now_s: float) -> bool:
        """Take a reading, if it is time; True when there is one more pair."""
        last = self._reading
        if last is not None and self._visit == visit and now_s - last.at_s < EVERY_S:
            return False
        gpus = nvml.own(self.run.gpus.read(), self.run.queue.devices)
        self._reading = new = slow.read(attempt.tree, visit[0], waited_s, gpus)
        same, self._visit = self._visit == visit, visit
        if last is None or not same:
            return False
        self._recent.append((new.at_s, slow.between(last, new, attempt.tree.members.keys())))
        keep_s = max(OLD_WINDOWS * self._window_s, self._pace.window_s + self._window_s)
        while self._recent[0][0] < new.at_s - keep_s or len(self._recent) > 2000:
            amounts = self._recent.popleft()[1]
            if not self._pace.slow:
                self._usual = slow.add([slow.add([self._usual], FADE), amounts])
        return True

    def _figures(self, now_s: float) -> dict[str, float]:
        """Of the slow time until now, compared with what was before it."""
        from_s = now_s - self._window_s if self._since_s is None else self._from_s
        late = [amounts for at_s, amounts in self._recent if at_s >= max(from_s, now_s - MOST_S)]
        early = [amounts for at_s, amounts in self._recent if at_s < from_s]
        return slow.figures(slow.add(late), slow.add([*early, self._usual]))

    def _explain(self, attempt: Attempt, step: int, under_way_s: float, now_s: float) -> None:
        """Report a slow time once its cause is known, or has stayed unknown for long; end one that needs no pace."""
        figures = self._figures(now_s)
        alone = slow.match(figures, alone=True)
        if self._since_s is None:
            if alone is None:
                self._report_over("its cause has passed")
            long = self._recent[-1][0] - self._recent[0][0] >= self._window_s
            row = alone if long and not self.found else None
        elif now_s - self._since_s < EVERY_S:
            return  # what the other programs do is measured from the beginning of the slow time
        else:
            row = alone or slow.match(figures) or slow.TABLE[-1]
            if row["name"] == slow.UNKNOWN:
                long = now_s - self._since_s >= UNEXPLAINED_WINDOWS * self._window_s
                longer = self._pace.own and self._pace.now_s(under_way_s) >= UNEXPLAINED * self._pace.usual_s
                row = row if long and longer and not self.found else None
            elif self.found and self.found["cause"] != slow.UNKNOWN:
                row = None
        if row is not None:
            self._report(attempt, row, figures, step, under_way_s)

    def _report(
        self, attempt: Attempt, row: dict[str, Any], figures: dict[str, float], step: int, under_way_s: float
    ) -> None:
        ours = attempt.tree.members.keys()
        gpus = self._reading.gpu if self._reading is not None else ()
        names = {
            "foreign_name": slow.foreign(gpus, ours),
            "throttle": next((g["throttle"] for g in gpus if g.get("throttle")), ""),
            "busiest": slow.busiest(self._before, ours),
        }
        known = slow.sentences(row, {**figures, "quota_cores": slow.quota_cores(self._visit[0])}, names)
        step_s = self._pace.now_s(under_way_s)
        usual_s = round(self._pace.usual_s, 3) if self._since_s is not None else None
        pace = f"A step takes {step_s:.2g} s" + (f" instead of {usual_s:.2g} s" if usual_s else "")
        self.found = {
            "cause": row["name"], **known, "ladder": row.get("ladder", []), "since": platform.now().utc, "step": step,
            "step_s": round(step_s, 3), "usual_s": usual_s, "pace": pace,
        }  # fmt: skip
        rounded = {name: round(value, 3) for name, value in sorted(figures.items())}
        message = f"{known['title']}. {pace}. {known['explanation']} {known['advice']}"
        self.run.folder.event("slowdown", message, cause=row["name"], step=step, step_s=step_s, figures=rounded)

    def _report_over(self, why: str) -> None:
        """Report the end of a slow time, if one was reported."""
        if not self.found:
            return
        lost_s = self._pace.lost_s
        lost = f"; {duration(lost_s)} were lost" if lost_s >= 1 else ""
        self.run.folder.event("slowdown_over", f"{why}{lost}", cause=self.found["cause"], lost_s=round(lost_s, 1))
        self.found = {}

    def _change(self) -> Changes | None:
        """The changes with one more that helps against this cause; None where none is allowed or left."""
        state, config = self.run.state, self.run.config
        known = self._known
        if not config.slow.changes_count or known is None or known.get("tried") or self.run.several:
            return None
        if not self.found["ladder"]:
            return None
        try:
            change = script.next_change(
                self.run.folder, self.found["ladder"], state.changes, config.check.render_s, self.run.pause
            )
        except (MonitorError, OSError) as error:
            self.run.folder.log(f"no change against the slowdown: {error}")
            change = {}
        known |= {"tried": change.get("name") or "none", "slow_s": self.found["step_s"]}
        if not change:
            return None
        patch = {name: value for name, value in change["patch"].items() if name != "spec"}
        self.run.folder.event("mitigated", change["sentence"], change=change["name"], patch=patch)
        return [*state.changes, change]

    def _tried(self, under_way_s: float) -> Changes | None:
        """Judge the change that was tried, once enough steps are known; the changes without it if it did not help."""
        known = self._known or {}
        before_s, tried = float(known.get("slow_s", 0.0)), known.get("tried")
        if not before_s or tried not in self._names() or self._pace.steps < MIN_STEPS:
            return None
        step_s = self._pace.now_s(under_way_s)
        known.pop("slow_s")
        if step_s < GAIN * before_s:
            self.run.folder.event(
                "slowdown_over", f"a step takes {step_s:.2g} s instead of {before_s:.2g} s since the change", cause=""
            )
            return None
        self.run.folder.event(
            "reverted", f"the change is taken back: a step takes {step_s:.2g} s with it, {before_s:.2g} s without"
        )
        return [change for change in self.run.state.changes if change["name"] != tried]


def _rehearsed_s(folder: Path) -> float:
    """Seconds of a step as the rehearsal of this run measured them; 0.0 without one, or after a change of the run."""
    rehearsal = folder / REHEARSAL
    try:
        if (folder / "run.toml").stat().st_mtime > rehearsal.stat().st_mtime:
            return 0.0
        return float((read_json(rehearsal) or {}).get("measured", {}).get("step_s") or 0.0)
    except (OSError, TypeError, ValueError):
        return 0.0
