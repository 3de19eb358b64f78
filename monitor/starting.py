"""How an attempt begins: adopt what lives, wait for the GPU, choose the checkpoint, write the script, start it."""

from __future__ import annotations

from guards import checkpoint
from monitor import checkpoints, clock, evidence, tree
from monitor.attempt import Attempt
from monitor.book import spec_mark
from monitor.core import EXIT_BUDGET, EXIT_FAILED, Core
from monitor.decide import Watch
from monitor.folder import FINAL, MonitorError
from monitor.helpers import problems, script_for


class Starting(Core):
    """queued → starting."""

    def open(self) -> None:
        """Take up the run: adopt a living training, or queue for a new attempt."""
        self.now = clock.now()
        self.files.stop_done()
        adopted = Attempt.adopt({"attempt_under_way": self.book.attempt_under_way})
        if adopted is not None and adopted.tree.members:
            self.adopt(adopted)
            return
        if self.end_strays():
            return
        for text in tree.strays():
            self.files.log(text)
        if self.book.state in FINAL:
            self.book.renewed(spec_mark(self.files.folder))
        self.book.spec_mark = self.book.spec_mark or spec_mark(self.files.folder)
        self.book.started_at = self.book.started_at or self.now.utc
        if adopted is not None and self.book.state not in FINAL:  # it ended while nobody watched
            self.attempt = adopted
            self.beats = adopted.beats()
            self.note_progress()
            self.over()
            return
        self.queue.ask(self.book.asked_at)
        self.book.asked_at = self.queue.asked_at
        self.turn("queued", "waiting for a free GPU")

    def adopt(self, attempt: Attempt) -> None:
        """A killed monitor left a living training: watch on, start nothing."""
        self.attempt = attempt
        self.queue.ask(self.book.asked_at)  # the GPU is held by the training's shell; after it, by us
        self._attach()
        self.files.event("started", f"took up the living training (attempt {attempt.number}, pid {attempt.pid})")
        self.turn("running", "taken up again after the monitor was gone")

    def end_strays(self) -> bool:
        """Name and end what earlier attempts of this run left running; True when something of it cannot be ended."""
        left = tree.with_environment(tree.RUN, str(self.files.folder))
        if not left:
            return False
        names = ", ".join(f"{p.name} ({p.pid})" for p in left)
        self.files.event("killed", f"ending what an earlier attempt left running: {names}")
        strays = tree.Tree("", members={p.pid: p for p in left})
        ended = tree.end(strays, self.limits.end.grace, self.limits.end.kill_wait)
        if ended.left:
            pids = ", ".join(str(p.pid) for p in ended.left)
            self.finish("unkillable", EXIT_FAILED, f"processes of an earlier attempt cannot be ended: pid {pids}")
        return bool(ended.left)

    def queued(self) -> None:
        if self.queue.acquire():
            self.begin()
        else:
            self.message = self.queue.message

    def begin(self) -> None:
        """Start the next attempt from the newest checkpoint that verifies."""
        if not self.queue.acquire():
            return self.turn("queued", self.queue.message)
        for place in self.state_folders():
            checkpoint.sweep(place)
        missing = checkpoints.room_missing(self.state_folders())
        if missing:
            return self.no_room(missing)
        self._room_since_s = None
        if self.incident is None and not self._checked and self.cannot_start():
            return
        chosen = self.checkpoint()
        number = self.book.attempt + 1
        if number == 1 and chosen.path is not None:
            number = 2  # attempt 1 is train.sh itself, which begins at the start
        changes = self.book.changes
        try:
            rendered = self.foresight.script(number, chosen.path, changes, self.book.was) or script_for(
                self.files, number, chosen.path, changes, self.book.was, self.limits.check.render, self.pause
            )
            if not rendered.fits:
                chosen = self.begin_again(chosen)
            self.attempt = Attempt.start(self.files, rendered.script, number, chosen.path, self.queue.handles())
        except (MonitorError, OSError) as error:
            return self.finish("failed", EXIT_FAILED, f"attempt {number} cannot be started: {error}")
        self.book.attempt, self.book.was, self.book.save_dir = number, [c["name"] for c in changes], rendered.save_dir
        self.book.resumed_step = chosen.step
        self.book.attempt_under_way = self.attempt.to_book()
        self.book.save(self.files)
        self.started(number, chosen)

    def cannot_start(self) -> bool:
        """Something is missing that a start needs (a model file, the checkout): say so at once, start nothing."""
        try:
            found = problems(self.files, self.limits.check.render, self.pause)
        except MonitorError as error:
            found = [str(error)]
        if found:
            self.finish("failed", EXIT_FAILED, "; ".join(found))
        return bool(found)

    def checkpoint(self) -> checkpoints.Chosen:
        """The newest state that verifies; bad ones are set aside and named."""
        chosen = checkpoints.choose(self.state_folders(), self.verifier, self.pause)
        for path, reason in chosen.bad:
            self.files.event("checkpoint_bad", f"{path.name}: {reason}", path=str(path))
        if self.incident is not None:
            self.incident.bad_checkpoints += [f"{p.name} ({reason})" for p, reason in chosen.bad]
        return chosen

    def begin_again(self, chosen: checkpoints.Chosen) -> checkpoints.Chosen:
        """What was changed does not fit the states of before: they are kept aside, and the training begins again."""
        for state in checkpoints.states(self.state_folders()):
            aside = checkpoint.set_aside(state, "saved before a change of the run that it does not fit")
            self.files.event("checkpoint_bad", f"{state.name} does not fit the changed run; kept as {aside.name}")
        self.book.best_step = 0
        if self.incident is not None:
            self.incident.changed.append("the training begins again: its checkpoints do not fit this change")
        return checkpoints.Chosen(None, 0, chosen.bad)

    def started(self, number: int, chosen: checkpoints.Chosen) -> None:
        """Say so, and watch it."""
        if self.incident is not None:
            self.incident.resumed_from = chosen.step
            self.incident.save(self.files)
        source = f"from step {chosen.step} ({chosen.path.name})" if chosen.path else "from the start"
        kind = "restarted" if self.incident is not None else "started"
        self.files.event(kind, f"attempt {number} {source}, pid {self.attempt.pid}", attempt=number, step=chosen.step)
        self._attach()
        self.turn("starting", source)

    def _attach(self) -> None:
        self.watch = Watch(self.limits, {**self.outlook.learned, **self.watch.learned()})
        self.drop_inquiry()
        self.beats = []
        self.outlook.attached()
        self._launcher_alone_s, self._orphan_said = None, False
        self.was_slow = ""
        self._last_step_s = None
        self.oom_kills_before = evidence.oom_kills()
        self._best_before = self.book.best_step
        self.waker.watch(self.attempt.pid)

    def no_room(self, missing: str) -> None:
        """The disk has no room for two checkpoints: nothing is started; after a failure it is looked at again."""
        if self.book.attempt == 0:
            return self.finish("failed", EXIT_FAILED, missing)
        if self._room_since_s is None:
            self._room_since_s = self.now.mono_s
            self.files.event("backoff", missing)
        if self.now.mono_s - self._room_since_s >= self.limits.restart.disk_wait:
            return self.finish("failed", EXIT_BUDGET, missing)
        self.due_s = self.now.mono_s + 30
        self.turn("backoff", missing)
