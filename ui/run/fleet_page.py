"""The third tab: runs on other machines, read from their stores.

A process of its own reads all stores (`python -m launch fleet`), again and again while somebody looks at the tab: each
look takes the answer that has come and starts what is due. The page shows what was read last, and how old that is, and
never waits: a store that is slow or fails costs only its own part.
"""

import json
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gradio as gr

from monitor.process.spawned import Subjob, python
from monitor.state import FINAL
from runs.files import RunError
from ui import scripts
from ui.html import part, pressed
from ui.run import cards, fold, view
from ui.run.fold import QUIET

TICK_S = 2.0
REFRESH_S = 20.0  # between two readings
READ_S = 90.0  # for one reading; the process has shorter limits of its own
STOP_S = 60.0


@dataclass
class Store:
    """What is known of one store. read_at: when `runs` was read, in UTC. stops: by run, what requests its stop."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    read_at: str = ""
    stops: dict[str, Subjob] = field(default_factory=dict)


class Fleet:
    """What is known of the stores. All methods return at once."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self.error = ""  # of the last reading as a whole
        self.reading: Subjob | None = None
        self.read_s: float | None = None  # the end of the last reading, monotonic; None: read at the next look
        self._lock = threading.Lock()

    def look(self) -> dict[str, Store]:
        """What is known of each store, by address. Takes what was read since the last look; reads when it is due."""
        with self._lock:
            if self.reading is not None and self.reading.done():
                self._take(self.reading)
                self.reading, self.read_s = None, time.monotonic()
            for stop in (stop for store in self.stores.values() for stop in store.stops.values()):
                stop.done()
            due = self.read_s is None or time.monotonic() - self.read_s >= REFRESH_S
            if due and self.reading is None:
                self.reading = Subjob(python("launch", "fleet", "--json"), READ_S)
            return {**self.stores}

    def stop(self, address: str, slug: str) -> None:
        """Request a stop through the store. RunError: the store is not in the list."""
        with self._lock:
            if address not in self.stores:
                raise RunError(f"The store {address[:200]!r} is not in the list")
            stops = self.stores[address].stops
            if slug not in stops or stops[slug].done():
                words = python("launch", "fleet", f"--store={address}", f"--stop={slug}", "--json")
                stops[slug] = Subjob(words, STOP_S)

    def _take(self, job: Subjob) -> None:
        """Keep the answer of a process that has ended; the runs that were read before stay when a store failed."""
        try:
            answers = {str(one["store"]): one for one in json.loads(job.text().strip().splitlines()[-1])}
        except (ValueError, IndexError, KeyError, TypeError, RecursionError):
            self.error = _reason(job)
            return
        self.error, self.stores = "", {address: self.stores.get(address) or Store() for address in answers}
        for address, store in self.stores.items():
            store.error = str(answers[address]["error"])
            if not store.error:
                store.runs = [one for one in answers[address]["runs"] if isinstance(one, dict) and "slug" in one]
                store.read_at = datetime.now(UTC).isoformat(timespec="seconds")
                for one in store.runs:
                    if one.get("state") in FINAL:  # it can be stopped again when it is started again
                        store.stops.pop(str(one["slug"]), None)


def _reason(job: Subjob) -> str:
    lines = [line for line in job.text().strip().splitlines() if line[:1] not in "[{"]
    return (lines[-1].removeprefix("launch fleet: ") if lines else job.error)[:500]


FLEET = Fleet()


# The tab --------------------------------------------------------------------------------------------------------------

STALE_S = 180.0  # a machine that trains writes its status every 15 s
HINT = "Runs on rented machines and clusters, read from the stores of your runs."
NOTHING = '<div class="hp-empty"><strong>No store is known</strong><p>Give a run a store to see it here.</p></div>'


def html() -> str:
    """Each store with its runs. All text is another machine's."""
    from launch.fleet import MOST_RUNS

    shown = "".join(_store(address, store, MOST_RUNS) for address, store in FLEET.look().items())
    return fold.note(FLEET.error, True) + shown or (fold.note("Reading…") if FLEET.read_s is None else NOTHING)


def _store(address: str, store: Store, most: int) -> str:
    when = cards.local_time(datetime.fromisoformat(store.read_at)) if store.read_at else ""
    runs = [_run(one, store.stops.get(one["slug"])) for one in store.runs]
    return part("run/fleet.html", "store", address, store, when, runs, most)


def _run(run: dict[str, Any], stop: Subjob | None) -> tuple[object, ...]:
    """A run, its state's colour and label, its figures, what is said of it, and the label of its Stop; "" for none."""
    shown = view.View(Path(run["slug"]), run["name"], {**run, "checkpoint": {"step": run.get("checkpoint_step")}})
    colour, state, _ = cards.STATES.get(run.get("state", ""), ("idle", "Unknown", ""))
    ended, updated = run.get("state") in FINAL, shown.time("updated_at")
    facts = [("Step", cards.steps(shown), ""), *cards.facts(shown, not ended)]
    if updated and not ended:
        facts.append(("Last update", cards.local_time(updated), ""))
    lines = [run.get("reason") or run.get("message")]
    if run.get("holder"):
        lines.append(f"{'Trained' if run.get('held') else 'Last trained'} by {run['holder']}.")
    if not ended and updated and (datetime.now(UTC) - updated).total_seconds() > STALE_S:
        lines.append("No update for a while: the machine may be gone. Another one can take over from the store.")
    lines.append(run.get("problem"))
    if stop is not None and stop.error:
        lines.append(f"The stop could not be requested: {_reason(stop)}")
    asked = run.get("stop_requested") or (stop is not None and not stop.error)
    return run, colour, state, facts, lines, "" if ended else "Stop requested" if asked else "Stop"


def _on_act(event: gr.EventData) -> list[str]:
    """The stores after a press of a run's Stop, and why it could not be done."""
    said = fold.tried(FLEET.stop)(pressed(event, "store"), pressed(event, "run"))
    return [html(), said]


def _on_refresh() -> list[str]:
    FLEET.read_s = None
    return [html(), ""]


def build() -> gr.Timer:
    """The tab. Returns the timer that reads what is shown; it is active while the tab is selected."""
    with gr.Column(elem_id="fleet", elem_classes="hp-fleet"):
        gr.HTML(f'<h3 class="hp-title">Other machines</h3><p class="hp-hint">{HINT}</p>', apply_default_css=False)
        again = gr.Button("Refresh", elem_id="store-refresh", scale=0, min_width=110)
        problem = gr.HTML(apply_default_css=False)
        shown = scripts.drawn("fleet-stores")
        timer, drawn = gr.Timer(TICK_S, active=False), gr.State("")

    def on_tick(before: str) -> list[Any]:
        now = html()
        return [gr.skip()] * 2 if now == before else [now, now]

    timer.tick(on_tick, drawn, [shown, drawn], **QUIET)
    again.click(_on_refresh, None, [shown, problem], **QUIET)
    shown.act(_on_act, None, [shown, problem], **QUIET)
    return timer
