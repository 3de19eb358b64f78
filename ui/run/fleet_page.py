"""The third tab: runs on other machines, read from their stores.

Each store is read by a process of its own (`python -m launch fleet --store …`), again and again while somebody looks at the tab. The
page shows what was read last, and how old that is, and never waits: a store that is slow, hangs or fails costs only its own part.
"""

import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monitor.process.subjob import Subjob, python
from ui import scripts
from ui.dataset.images import OUT_OF_DATE

if TYPE_CHECKING:
    import gradio as gr

REFRESH_S = 20.0  # between two readings of a store
WATCHED_S = 15.0  # a tab that asked so recently is being looked at
STORE_S = 90.0  # for one reading; the process has shorter limits of its own
STOP_S = 60.0
AT_ONCE = 6  # processes


@dataclass
class Store:
    """What is known of one store. Times are monotonic."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    read_s: float | None = None  # when `runs` was read
    tried_s: float | None = None
    job: Subjob | None = None


class Fleet:
    """Reads the stores in the background. All methods return at once."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self._listed = False  # whether the stores of this machine were looked for
        self.stops: dict[
            tuple[str, str], str
        ] = {}  # (store, run) -> "" while the request is sent, then what came of it
        self._stopping: dict[tuple[str, str], Subjob] = {}
        self._asked_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def snapshot(self) -> list[dict[str, Any]] | None:
        """What is known of each store; None until it is known which there are."""
        with self._lock:
            self._asked_s = now_s = time.monotonic()
            self._wake()
            if not self._listed:
                return None
            return [
                {
                    "store": address,
                    "error": store.error,
                    "age_s": None if store.read_s is None else round(now_s - store.read_s),
                    "reading": store.job is not None,
                    "runs": [
                        {**one, "stop": self.stops.get((address, one["slug"]))} for one in store.runs if "slug" in one
                    ],
                }
                for address, store in self.stores.items()
            ]

    def refresh(self) -> None:
        """Read every store again now."""
        with self._lock:
            for store in self.stores.values():
                store.tried_s = None
            self._asked_s = time.monotonic()
            self._wake()

    def stop(self, address: str, slug: str) -> None:
        """Request a stop through the store."""
        with self._lock:
            key = (address, slug)
            if key not in self._stopping:
                self.stops[key] = ""
                command = python("launch", "fleet", f"--store={address}", f"--stop={slug}", "--json")
                self._stopping[key] = Subjob(command, STOP_S)
                self._asked_s = time.monotonic()
                self._wake()

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, daemon=True, name="fleet")
            self._thread.start()

    def _work(self) -> None:
        """Until nobody looks any more."""
        while True:
            addresses = _addresses()
            with self._lock:
                self._collect()
                watched = time.monotonic() - self._asked_s < WATCHED_S
                if watched:
                    self.stores = {address: self.stores.get(address) or Store() for address in addresses}
                    self._listed = True
                    self._begin()
                busy = self._stopping or any(store.job for store in self.stores.values())
                if not watched and not busy:
                    self._thread = None
                    return
            time.sleep(0.2)

    def _begin(self) -> None:
        now_s, free = time.monotonic(), AT_ONCE - sum(store.job is not None for store in self.stores.values())
        for address, store in self.stores.items():
            due = store.tried_s is None or now_s - store.tried_s >= REFRESH_S
            if free > 0 and store.job is None and due:
                free -= 1
                store.job = Subjob(python("launch", "fleet", f"--store={address}", "--json"), STORE_S)

    def _collect(self) -> None:
        for store in self.stores.values():
            if store.job is not None and store.job.done():
                job, store.job, store.tried_s = store.job, None, time.monotonic()
                _take(store, job)
        for key, job in list(self._stopping.items()):
            if job.done():
                del self._stopping[key]
                self.stops[key] = f"The stop could not be requested: {_reason(job)}" if job.error else "Stop requested"
                if key[0] in self.stores:
                    self.stores[key[0]].tried_s = None


def _take(store: Store, job: Subjob) -> None:
    """Keep the answer of a process that has ended; an old one stays when the store failed."""
    try:
        (answer,) = json.loads(job.text().strip().splitlines()[-1])
        runs, error = answer["runs"], str(answer["error"])
    except (ValueError, IndexError, KeyError, TypeError, RecursionError):
        store.error = _reason(job)
        return
    store.error = error
    if not error:
        store.runs, store.read_s = [one for one in runs if isinstance(one, dict)], time.monotonic()


def _reason(job: Subjob) -> str:
    lines = [line for line in job.text().strip().splitlines() if line[:1] not in "[{"]
    return (lines[-1].removeprefix("launch fleet: ") if lines else job.error)[:500]


def _addresses() -> list[str]:
    from launch.fleet import stores

    return stores()


FLEET = Fleet()


# Calls of the script ------------------------------------------------------------------------------------------------------


def show_fleet(data: dict[str, Any]) -> dict[str, Any]:
    """What is known of all stores, "stores": None until it is known which there are; with {"refresh": true}, they are read again."""
    from launch.fleet import added

    if isinstance(data, dict) and data.get("refresh") is True:
        FLEET.refresh()
    return {"ok": True, "stores": FLEET.snapshot(), "added": added()}


def change_stores(data: dict[str, Any]) -> dict[str, Any]:
    """Add or remove the address of a store: {"add": address} or {"remove": address}."""
    from launch.common import LaunchError
    from launch.fleet import add, remove

    given = data if isinstance(data, dict) else {}
    act = add if "add" in given else remove
    address = given.get("add", given.get("remove"))
    if not isinstance(address, str) or len(address) > 500 or not address.isprintable():
        return {"ok": False, "error": OUT_OF_DATE}
    if not address.strip():
        return {"ok": False, "error": "Enter the address of a store, such as s3://bucket/runs"}
    try:
        act(address)
    except LaunchError as error:
        return {"ok": False, "error": str(error)}
    FLEET.refresh()
    return {"ok": True}


def stop_far(data: dict[str, Any]) -> dict[str, Any]:
    """Request the stop of a run through its store: {"store", "run"}."""
    store, slug = (data.get(key) if isinstance(data, dict) else None for key in ("store", "run"))
    if not isinstance(store, str) or not isinstance(slug, str):
        return {"ok": False, "error": OUT_OF_DATE}
    if store not in _addresses():
        return {"ok": False, "error": f"The store {store[:200]!r} is not in the list. Add it, then try again"}
    FLEET.stop(store, slug)
    return {"ok": True}


def build() -> "gr.HTML":
    """The component. Its script asks for what it shows while its tab is open."""
    return scripts.component("fleet_page", "fleet", show_fleet, change_stores, stop_far)
