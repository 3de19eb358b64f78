"""`python -m launch fleet`: the runs on other machines, read from their stores; and a stop through a store.

Decision: of each run in a store two small files are read: its status, and the claim of the machine that holds the
lease; its checkpoints are not even listed. All that comes from a store is hostile until it has been checked: sizes are
bounded, and only known values are taken over.

The stores are those of the runs on this machine. All are read at the same time, and a store gets one call to answer:
whoever looks again asks again.
"""

import argparse
import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from launch.common import LaunchError, Option, report
from launch.store import lease
from launch.store.places import Limits, NotFound, Place, StoreError, one_line, open_place
from monitor.phrases import count, duration
from monitor.process import platform
from monitor.run_folder import read_spec
from monitor.state import FINAL, State
from runs.paths import MAX_SLUG, list_runs

LIMITS = Limits(call_s=10.0, tries=1)
MOST_RUNS = 100  # of one store, the newest
MOST_STORES = 50
THREADS = 8  # calls to one store at the same time
STORE_S = 30.0  # after which no more of its runs are read: the page shows nothing before all stores have answered
STATUS_BYTES = 256 << 10
SLUG = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_-]{{0,{MAX_SLUG - 1}}}")
WORDS = ("name", "message", "reason", "phase")
NUMBERS = ("step", "planned_steps", "epoch", "loss", "step_s", "eta_s", "restarts", "incidents", "elapsed_s")


def stores() -> list[str]:
    """The addresses of the stores of the runs on this machine."""
    own = (read_spec(folder).get("store") for folder in list_runs())
    addresses = [address.strip() for address in own if isinstance(address, str)]
    return [*dict.fromkeys(filter(None, addresses))][:MOST_STORES]


def read_store(address: str) -> list[dict[str, Any]]:
    """The runs in a store, the newest first, as plain values that are safe to show.

    Raises LaunchError: the store does not answer, or refuses.
    """
    place = open_place(address, LIMITS)
    slugs = [slug for slug in place.folders() if SLUG.fullmatch(slug)]
    until_s = time.monotonic() + STORE_S
    with ThreadPoolExecutor(THREADS) as pool:
        found = [run for run in pool.map(lambda slug: read_run(place.under(slug), slug, until_s), slugs) if run]
    return sorted(found, key=lambda run: run["updated_at"] or "", reverse=True)[:MOST_RUNS]


def read_run(place: Place, slug: str, until_s: float) -> dict[str, Any] | None:
    """A run's status in a store, who holds its lease, whether a stop is requested; None for a folder that is no run.

    Its state is "unknown" without a status; what cannot be read is named in "problem".
    """
    run: dict[str, Any] = {"slug": slug, "name": slug, "state": "unknown", "problem": "", "updated_at": None}
    run |= {"holder": "", "held": False, "stop_requested": False}
    found: dict[str, Any] = {}
    try:
        if time.monotonic() > until_s:
            raise StoreError(f"not read: the store did not send all runs within {STORE_S:.0f} s")
        with contextlib.suppress(NotFound):
            run |= (found := status(place.read("status.json", STATUS_BYTES), slug))
        if claim := lease.current(place):
            run |= {"holder": claim.owner.text(), "held": claim.held and not claim.released}
        run["stop_requested"] = "requests/stop.json" in place.list("requests")
    except StoreError as error:
        run["problem"] = run["problem"] or one_line(error, 500)
    return run if found or run["holder"] or run["problem"] else None


def status(data: bytes, slug: str) -> dict[str, Any]:
    """The values of another machine's status.json that are known and of the right kind."""
    try:
        values = dict(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return {"problem": "status.json is damaged"}
    found: dict[str, Any] = {key: one_line(values[key]) for key in WORDS if isinstance(values.get(key), str)}
    found["name"] = found.get("name") or slug
    numbers = {key: values[key] for key in NUMBERS if type(values.get(key)) in (int, float)}
    found |= {key: value for key, value in numbers.items() if abs(value) < 1e15}  # False for NaN
    found["state"] = values["state"] if values.get("state") in [*State] else "unknown"
    checkpoint = values.get("checkpoint")
    step = checkpoint.get("step") if isinstance(checkpoint, dict) else None
    found["checkpoint_step"] = step if isinstance(step, int) and 0 <= step < 10**12 else None
    with contextlib.suppress(ValueError, OverflowError):
        when = datetime.fromisoformat(str(values.get("updated_at")))
        found["updated_at"] = when.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return found


def request_stop(address: str, slug: str, now: bool = False) -> None:
    """Ask the machine that trains a run to stop it. Its agent reads this within `store.status_s` seconds.

    Raises LaunchError: the store does not answer, or refuses; or that is no run's name.
    """
    if not SLUG.fullmatch(slug):
        raise LaunchError(f"{slug[:100]!r} is not the name of a run in a store")
    place = open_place(address, LIMITS).under(slug)
    if not lease.claims(place):
        raise LaunchError(f"{address} has no run {slug} that a machine trains")
    place.put("requests/stop.json", json.dumps({"now": now, "at": platform.now().utc}).encode())


def read_all(addresses: list[str]) -> list[dict[str, Any]]:
    """[{"store", "runs", "error"}] of stores that are read at the same time."""

    def read(address: str) -> dict[str, Any]:
        try:
            return {"store": address, "runs": read_store(address), "error": ""}
        except (LaunchError, OSError) as error:
            return {"store": address, "runs": [], "error": one_line(error, 500)}

    with ThreadPoolExecutor(MOST_STORES) as pool:
        return [*pool.map(read, addresses)]


def describe(run: dict[str, Any], now: datetime) -> str:
    """One run in one line."""
    steps = f", step {run.get('step', 0):.0f}" + (f" of {run['planned_steps']:.0f}" if run.get("planned_steps") else "")
    loss = f", loss {run['loss']:.4f}" if "loss" in run else ""
    then = datetime.fromisoformat(run["updated_at"]) if run.get("updated_at") else None
    age = f", {duration(max(0.0, (now - then).total_seconds()))} ago" if then else ""
    held = f", trained by {run['holder']}" if run.get("held") and run["state"] not in FINAL else ""
    stopping = ", a stop was requested" if run["stop_requested"] else ""
    problem = f" ({run['problem']})" if run["problem"] else ""
    return f"{run['slug']}: {run['state']}{steps}{loss}{age}{held}{stopping}{problem}"


OPTIONS: tuple[Option, ...] = (
    ("--store ADDRESS", [], "read this store only"),
    ("--stop RUN", None, "with --store: ask the machine that trains this run to stop it"),
    ("--now", False, "with --stop: do not wait for a checkpoint"),
)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when no store answers."""
    if args.stop is not None:
        if len(args.store) != 1:
            raise LaunchError("--stop needs the store of the run: --store ADDRESS")
        request_stop(args.store[0], args.stop, args.now)
        text = f"{args.stop}: stop requested; the machine that trains it reads the request within a minute"
        return report(args, text, {"store": args.store[0], "run": args.stop, "requested": True})
    found = read_all(args.store or stores())
    for one in found:
        print(f"{one['store']}: {one['error'] or count(len(one['runs']), 'run')}")
        for row in one["runs"]:
            print(f"  {describe(row, datetime.now(UTC))}")
        if len(one["runs"]) == MOST_RUNS:
            print(f"  The store may have older runs: the {MOST_RUNS} newest are shown.")
    if not found:
        print("no store is known; set `store` in a run.toml, or name one: python -m launch fleet --store ADDRESS")
    report(args, "", found)
    return 1 if found and all(one["error"] for one in found) else 0
