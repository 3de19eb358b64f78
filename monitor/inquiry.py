"""The inquiry into a suspected run: samples, stacks and py-spy, taken beside the watching and never waited for.

Begun at half the budget. At the full budget the second sample is compared with the first, and from then on again and again
with one some time before, so that a run that has got stuck after a slow stretch is seen, and one that moves is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from guards.heartbeat import Beat
from monitor import signals, stacks, system
from monitor.decide import Signals, Verdict
from monitor.limits import Limits
from monitor.tree import Tree

OTHERS = 4  # workers that are asked for their stacks, beside the ranks


class Inquiry:
    """One inquiry. `gpu` returns the newest GPU readings, () where there are none."""

    def __init__(self, tree: Tree, heartbeats: Path, limits: Limits, gpu: Callable[[], tuple[dict, ...]]):
        self.tree = tree
        self.limits = limits
        self.found = Signals()
        self.dumps: dict[int, str] = {}
        self.spy = stacks.PySpy(limits.check.py_spy)
        self._heartbeats = heartbeats
        self._gpu = gpu
        self._samples: list[signals.Sample] = []
        self._full = False

    def begin(self, beats: list[Beat], full: bool) -> None:
        """The first sample; `full`: with stacks (a signal to the process) and py-spy."""
        self.tree.refresh()
        self._take(beats, full)
        self._begun = self._samples[0]
        if full:
            self._spy(beats)

    def due(self, verdict: Verdict, now_s: float) -> bool:
        """Is it time for another sample?"""
        if verdict.quiet_s < verdict.budget_s:
            return False
        return now_s - self._samples[-1].at_s >= max(0.3, min(verdict.budget_s / 4, 5.0)) or not self._full

    def ask(self, beats: list[Beat], budget_s: float = 0.0) -> Signals:
        """Take another sample and compare; the signals are also `found`. `budget_s` is the budget that is used up."""
        self._take(beats, stacks_too=True)
        self._spy(beats)
        last = self._samples[-1]
        # The oldest with stacks of the last few: the longer between the two, the more "the same" says.
        first = next((s for s in self._samples[:-1] if s.stacks or not last.stacks), self._samples[0])
        ranks = [b.pid for b in beats]
        enough = signals.cpu_of(self._begun, last, ranks) >= budget_s
        self.found = signals.compare(first, last, ranks, enough)
        self._samples = self._samples[-3:]
        return self.found

    def close(self) -> None:
        """Nothing of it is left running."""
        self.spy.cancel()

    def poll(self) -> None:
        self.spy.poll()

    def texts(self) -> dict[int, str]:
        """Stacks by process: the guards' own, and py-spy's where those are missing or beside them for a worker."""
        self.spy.poll()
        return {**{p: f"(py-spy)\n{t}" for p, t in self.spy.texts.items() if p not in self.dumps}, **self.dumps}

    @property
    def last(self) -> signals.Sample:
        """The newest sample."""
        return self._samples[-1]

    def _take(self, beats: list[Beat], stacks_too: bool) -> None:
        text = ""
        if stacks_too:
            self._full = True
            ranks = [(p.pid, p.start) for beat in beats if (p := system.proc(beat.pid)) is not None]
            # Workers of the loader have a handler too, where the trainer has one: they say where they stand even where
            # py-spy may not look.
            found = stacks.dump(self._heartbeats, ranks + self._others(beats), self.limits.check.stack_dump)
            self.dumps.update(found)
            text = "".join(stacks.comparable(found[pid]) for pid, _ in ranks if pid in found)
        self._samples.append(signals.take(self.tree.keys(), self._gpu(), text))

    def _others(self, beats: list[Beat]) -> list[tuple[int, float]]:
        """A few of the Python processes that are no ranks: (pid, start)."""
        ranks = {b.pid for b in beats}
        members = self.tree.members.values()
        return [(p.pid, p.start) for p in members if p.name.startswith(("python", "pt_")) and p.pid not in ranks][
            :OTHERS
        ]

    def _spy(self, beats: list[Beat]) -> None:
        for pid in [b.pid for b in beats] + [pid for pid, _ in self._others(beats)]:
            process = system.proc(pid)
            if process is not None and not process.dead and pid not in self.spy.texts:
                self.spy.begin(pid, process.start)
