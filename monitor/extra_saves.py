"""Extra checkpoints between two saves of a run with a store, so that what the store has is never older than one save interval.

A machine that dies while checkpoint N is being copied leaves the one before it in the store: without these, that is a
whole interval plus the time of the copy. The training saves a state alone (guards/step_requests.py), and old ones go as
usual. None is requested while a checkpoint is still being copied, when a save takes more than SAVE_SHARE of the
interval, or when the next regular save is near.
"""

from __future__ import annotations

import contextlib

from guards import step_requests
from monitor.run_folder import RunFolder

SAVE_SHARE = 0.02  # of the interval's time that a save may take
STALE_SHARE = 0.5  # of a part of the interval: later, the next regular save is near


def boundary(step: int, every: int, count: int) -> int | None:
    """The step at which the extra save was due that can be requested now, None while there is none.

    every: steps between two regular saves, with `count` extra ones between them.
    """
    if every < 2 * (count + 1) or count < 1 or step < 1:
        return None
    part_steps = every / (count + 1)
    part, into = divmod(step % every, part_steps)
    return step - round(into) if part and into < part_steps * STALE_SHARE else None


class ExtraSaves:
    """Requests them for one run. `count`: between two regular saves."""

    def __init__(self, folder: RunFolder, count: int):
        every = folder.spec.get("save_every_n_steps")
        self.folder = folder
        self.every = every if isinstance(every, int) else 0
        self.count = count
        self._requested = -1  # the boundary of the last one

    def tick(self, step: int, copying: bool, step_s: float, save_s: float) -> bool:
        """Request one where it is due; whether it did.

        copying: a checkpoint is on its way to the store. step_s, save_s: seconds of the usual step and save. A save
        that is shorter than the time between two observations is never seen, and is 0.0.
        """
        due = boundary(step, self.every, self.count)
        slow = save_s > SAVE_SHARE * self.every * step_s
        if due is None or due <= self._requested or copying or slow:
            return False
        with contextlib.suppress(OSError):
            step_requests.ask(self.folder.folder, "state")
            self._requested = due
            return True
        return False
