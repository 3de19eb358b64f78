"""`python -m launch store restore|status|release STORE RUN`, and `agent`, which the monitor starts."""

import argparse
import sys
from pathlib import Path
from typing import Any

from launch.common import report
from launch.store.lease import current, take_away
from launch.store.places import Place, StoreError, open_place
from monitor.process.platform import LOCK, is_held
from monitor.run_folder import read_spec
from runs.paths import outputs_dir, slug


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    choices = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("restore", "fetch a run to an empty machine, or bring this machine's copy up to date; then `monitor run RUN`"),
        ("status", "show what the store has of a run, and who holds its lease"),
        ("release", "take the lease from a machine that is gone; a living one stops training this run"),
    ):
        command = choices.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="end with one line of JSON")
        command.add_argument("store", metavar="STORE", help="address of the store, as in run.toml")
        command.add_argument("run_name", metavar="RUN", help="name of the run")
    agent = choices.add_parser("agent")  # no help: only the monitor calls it
    agent.add_argument("folder", type=Path)
    agent.add_argument("--adopted", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 for the agent of a store that cannot be used.

    Raises StoreError: the store cannot be used or read, or does not have the run, or the run to restore trains here.
    RunError: the run's name is not valid.
    """
    if args.action == "agent":
        from launch.store import agent

        return agent.run(args.folder, args.adopted)
    name = slug(args.run_name)
    place = open_place(args.store).under(name)
    return {"restore": _restore, "status": _status, "release": _release}[args.action](args, place, name)


def _restore(args: argparse.Namespace, place: Place, name: str) -> int:
    from launch.store.restore import restore

    folder = outputs_dir() / name
    if is_held(folder / LOCK):
        raise StoreError(f"{name} trains on this machine; stop it first: python -m monitor stop {name}")
    found = restore(place, name)
    for note in found.notes:
        print(f"store: {note}", file=sys.stderr)
    if found.manifest is None:
        raise StoreError(f"{place.address} has no complete copy of {name}; start the run where its data set is")
    own, moved = str(read_spec(folder).get("store") or ""), place.address.rpartition("/")[0]
    if own.rstrip("/") not in (args.store.rstrip("/"), moved):
        why = f"`monitor run` uses {own or 'no store'}, as run.toml says. To go on with this one, set store = {moved!r}"
        print(f"store: {why} in {folder / 'run.toml'} first", file=sys.stderr)
    step = max(0, found.step)
    what = f"restored {found.files} files" if found.files else "nothing is newer in the store"
    text = f"{folder}: {what}; continues from step {step}. Now: python -m monitor run {name}"
    values: dict[str, Any] = {"folder": str(folder), "step": step, "files": found.files}
    values |= {"fetched_bytes": found.fetched_bytes, "manifest": found.manifest.name}
    return report(args, text, values)


def _status(args: argparse.Namespace, place: Place, name: str) -> int:
    from launch.store.copies import newest_manifest

    manifest, claim = newest_manifest(place, name), current(place)
    if manifest is None and claim is None:
        raise StoreError(f"{place.address} does not exist, or holds no run; check the address and the name")
    holder = claim.owner.text() if claim and not claim.released else None
    lines, values = [f"lease: {holder or 'nobody'}"], {"run": name, "holder": holder, "step": None, "size": 0}
    if manifest is not None:
        step, done = max(0, manifest.step), ", completed" if manifest.completed else ""
        lines.append(f"step {step}{done}, {len(manifest.files)} files, {manifest.size / 1e6:.1f} MB")
        lines.append(f"written {manifest.written_at} by {manifest.owner}")
        values |= {"step": step, "completed": manifest.completed, "size": manifest.size, "manifest": manifest.name}
        values |= {"written_at": manifest.written_at, "written_by": manifest.owner}
    return report(args, "\n".join(lines), values)


def _release(args: argparse.Namespace, place: Place, name: str) -> int:
    claim = current(place)
    if claim is None or claim.released:
        return report(args, f"{name}: nobody holds the lease", {"run": name, "holder": None})
    take_away(place, claim)
    holder = claim.owner.text()
    text = f"{name}: took the lease from {holder}; if it is alive, it stops this run within {claim.period_s:.0f} s"
    return report(args, text, {"run": name, "holder": holder})
