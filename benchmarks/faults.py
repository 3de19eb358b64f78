"""The fault matrix: inject a fault into a real run of the built-in trainer and compare the outcome with the table.

    python -m benchmarks faults --list [--json]
    python -m benchmarks faults --run NAME [--without-recovery] [--json] [--seed N] [--keep DIR]

Decision: the table (`faults.toml`) holds the required outcomes, in terms of the monitor's own files; no code here
knows a fault by name. Each row runs the real monitor, launcher and trainer on a tiny model at 50 ms a step. The same
seed injects at the same step. `--run all` runs every row. `--without-recovery`: with snapshots in memory and the
standby attempt turned off; the outcomes are the same. A row that cannot run on this machine says why; one whose
outcome differs, what was expected and observed.

Afterwards no process and no file of it is left, Ctrl-C included; `--keep DIR` keeps the run's folder and the
monitors' output.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import tomllib

from benchmarks.faults_actions import ACTIONS
from benchmarks.injector import INJECTED, doubled
from benchmarks.report import CannotMeasure, Report, say
from benchmarks.scenario import NAME, Mismatch, Row, Scenario, is_root, prepare, sha256
from benchmarks.trial import read_end
from monitor.resume import snapshots

DETECT_S = 10.0
SLACK_S = 5.0
LORA = f"{NAME}.safetensors"
WITHOUT = {"standby": {"tries_count": 0}, "restart": {"snapshots_bytes": 0}}  # limits that turn both off
MEMORY, EARLY = "a snapshot in memory", "which had been started early"  # in the events of attempts


def table() -> dict[str, Row]:
    """The rows of the matrix by name, in order."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: {"name": name, **row} for name, row in rows.items()}


def without_recovery(row: Row) -> Row:
    """The row in a run that has neither snapshots in memory nor a standby attempt."""
    limits = dict(row.get("limits", {}))
    for section, values in WITHOUT.items():
        limits[section] = {**limits.get(section, {}), **values}
    return {**row, "limits": limits, "expect": {**row["expect"], **row.get("without", {})}, "recovery": False}


def missing(row: Row) -> str:
    """Why the row cannot run on this machine; "" when it can."""
    off = "it is about snapshots in memory or the standby attempt, and they are turned off"
    conditions = {
        "recovery": (row.get("recovery", True), off),
        "linux": (sys.platform.startswith("linux"), "Linux only"),
        "root": (is_root(), "only root may mount a file system"),
        "pids": (os.access("/proc/sys/kernel/ns_last_pid", os.W_OK), "process numbers cannot be chosen here"),
        "loop": (Path("/dev/loop-control").exists(), "no loop devices, so no file system can be frozen"),
    }
    for need in row.get("needs", []):
        met, why = conditions.get(need) or (shutil.which(need), f"{need} is not installed")
        if not met:
            return why
    return ""


def compare(scenario: Scenario) -> list[str]:
    """How the outcome differs from what the row requires; [] when it does not."""
    want, status = scenario.row["expect"], scenario.status()
    wrong = []

    def check(what: str, seen: object, expected: object) -> None:
        if seen != expected:
            wrong.append(f"{what}: {seen!r}, expected {expected!r}")

    check("state", status.get("state"), want["state"])
    check("exit code", scenario.codes[-1], want["code"])
    least, most = want["restarts"] if isinstance(want["restarts"], list) else [want["restarts"]] * 2
    if not least <= status.get("restarts", -1) <= most:
        wrong.append(f"restarts: {status.get('restarts')}, expected {want['restarts']}")
    if "changes" in want:
        check("changes of the run", len(status.get("changes", [])), want["changes"])
    if "inject" in scenario.row and INJECTED not in read_end(scenario.folder / "training.log", 50_000_000):
        wrong.append("the fault was never injected, so nothing was tested")
    wrong += [
        f"{mark} was never called, so nothing was tested" for mark in want.get("used", []) if not scenario.used(mark)
    ]
    wrong += _incidents(scenario, want) + _checkpoints(scenario, want) + _lora(scenario, want)
    wrong += _restarted(scenario, want) + _writers(scenario)
    if want["state"] != "unkillable" and (left := _left(scenario)):
        wrong.append(f"left running: {left}")
    return wrong


def _restarted(scenario: Scenario, want: Row) -> list[str]:
    """How attempts began: from memory or the disk, early or cold."""
    texts = [event["message"] for kind in ("started", "restarted") for event in scenario.events(kind)]
    again = [text for text in texts if " from step " in text or " from the start" in text][1:]
    off = not scenario.row.get("recovery", True)
    wrong = []
    for word, wanted in ((MEMORY, want.get("memory")), (EARLY, want.get("early"))):
        wanted = False if off else wanted
        if wanted is not None and any((word in text) != wanted for text in again):
            wrong.append(f"restarted: {again}, expected {'all' if wanted else 'none'} with {word!r}")
    return wrong


def _writers(scenario: Scenario) -> list[str]:
    """No two processes of a run trained at the same time, and nothing of the run is left in memory."""
    wrong = [f"two writers: {text}" for text in doubled(scenario.writers)]
    attempts = [step["attempt"] for step in scenario.steps()]
    if attempts != sorted(attempts):
        wrong.append("two writers: in metrics.jsonl a step of an earlier attempt follows one of a later attempt")
    place = Path(scenario.environment.get(snapshots.PLACE, snapshots.place()))
    owners = [path for path in place.glob(f"*/*/{snapshots.OWNER}") if read_end(path) == str(scenario.folder)]
    if owners and scenario.status().get("state") in ("completed", "failed"):
        wrong.append(f"snapshots are left in memory: {owners[0].parent}")
    return wrong


def _left(scenario: Scenario) -> dict[int, str]:
    """What still runs. A helper that is ending gets a moment for it."""
    deadline = time.monotonic() + scenario.slack_s
    while (left := scenario.ours()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _incidents(scenario: Scenario, want: Row) -> list[str]:
    found, wrong = scenario.incidents(), []
    seen = [incident["cause"] for incident in found]
    expected = want.get("incidents")
    if isinstance(expected, int):
        if len(found) != expected:
            wrong.append(f"incidents: {seen}, expected {expected} of them")
    elif expected is not None and not _same(seen, expected):
        wrong.append(f"incidents: {seen}, expected {expected}")
    for incident in found:
        # On a busy machine the steps before the fault were slow, so the learned limit is longer; while others keep the
        # processor busy, the monitor waits eight times the limit (detect/progress.py).
        times = 8 if any("keep the processor busy" in e["message"] for e in scenario.events("slow")) else 2
        budget_s = times * incident["evidence"].get("budget_s", 0.0)
        within = max(want.get("detect_s", DETECT_S), budget_s + scenario.slack_s)
        if incident["kind"] == "hang" and incident["detect_s"] > within:
            wrong.append(f"the hang was declared after {incident['detect_s']:.1f} s, expected within {within:.1f}")
    for incident, report in zip(found, scenario.reports(), strict=False):
        if incident["title"] not in report or "{" in report.partition("The last lines of the log")[0]:
            wrong.append(f"report.md of incident {incident['id']} does not contain {incident['title']!r}")
    if len(scenario.reports()) != len(found):
        wrong.append(f"{len(found)} incidents, but {len(scenario.reports())} reports")
    return wrong


def _same(causes: list[str], expected: list[list[str]]) -> bool:
    return len(causes) == len(expected) and all(c in names for c, names in zip(causes, expected, strict=True))


def _checkpoints(scenario: Scenario, want: Row) -> list[str]:
    messages = [event["message"] for event in scenario.events("checkpoint_bad")]
    wrong = [
        f"no event names a bad checkpoint with {word!r}: {messages}"
        for word in want.get("set_aside", [])
        if not any(word in m for m in messages)
    ]
    if len(messages) != len(want.get("set_aside", [])) and "set_aside" in want:
        wrong.append(f"checkpoints set aside: {messages}, expected {len(want['set_aside'])}")
    if "set_aside" in want and not list(scenario.folder.glob("*-state.bad*")):
        wrong.append("the bad checkpoint was not kept under another name")
    return wrong


def _lora(scenario: Scenario, want: Row) -> list[str]:
    path = scenario.folder / LORA
    if want["lora"] == "any":
        return []
    if want["lora"] == "none":
        return [f"{LORA} exists although the training did not finish"] if path.exists() else []
    if not path.exists():
        return [f"{LORA} is missing"]
    wrong = []
    if sha256(path) != scenario.reference.sha256:
        wrong.append(f"{LORA} differs from that of the undisturbed run")
    trained = {step["step"] for step in scenario.steps()}
    if trained != set(range(1, scenario.reference.steps + 1)):
        wrong.append(f"steps trained: {len(trained)} of {scenario.reference.steps}")
    return wrong


def run(
    row: Row, seed: int = 0, keep: Path | None = None, kind: type[Scenario] = Scenario, slack_s: float = SLACK_S
) -> dict[str, Any]:
    """Play a row; {"name", "seed", "ok", "skipped", "problems", "seen", "kept", "seconds"}.

    keep: the run's folder is kept in it, else nothing is left. slack_s: what a busy machine may add to the seconds
    that the row requires; tests set a large value because they check what happens, not how fast.
    """
    began = time.monotonic()
    result = {"name": row["name"], "seed": seed, "ok": True, "skipped": missing(row), "problems": [], "seen": {}}
    if result["skipped"]:
        return {**result, "seconds": 0.0}
    with prepare(row, seed, keep, kind) as scenario:
        scenario.slack_s = slack_s
        try:
            ACTIONS[row.get("action", "watch")](scenario)
            result["problems"] = compare(scenario) + scenario.compare()
        except Mismatch as wrong:
            result["problems"] = [str(wrong)]
        result["seen"] = observe(scenario)
        if result["problems"]:
            logs = [
                scenario.folder / "monitor.log",
                scenario.folder / "training.log",
                *scenario.root.glob("monitor-*.txt"),
            ]
            result["logs"] = {path.name: read_end(path) for path in logs}
        if keep is not None:
            result["kept"] = str(scenario.root)
    return {**result, "ok": not result["problems"], "seconds": round(time.monotonic() - began, 1)}


def observe(scenario: Scenario) -> dict[str, Any]:
    """What happened, from the run's own files."""
    status = scenario.status()
    keys = ("cause", "kind", "phase", "step", "resumed_from", "steps_repeated", "detect_s", "recover_s", "changed")
    return {
        **{key: status.get(key) for key in ("state", "step", "restarts", "attempt", "message")},
        "codes": scenario.codes,
        "fault_step": scenario.environment.get("HANGPROOF_FAULT_STEP"),
        "incidents": [{key: incident.get(key) for key in keys} for incident in scenario.incidents()],
    }


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the faults and the required outcomes")
    what.add_argument("--run", metavar="NAME", action="append", help="a fault of the list, or all")
    parser.add_argument(
        "--without-recovery", action="store_true", help="without snapshots in memory and the standby attempt"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="keep the run's folder and the monitors' output in DIR"
    )


def measure(args: argparse.Namespace) -> Report:
    """Play the rows, or list them."""
    rows = table()
    if args.without_recovery:
        rows = {name: without_recovery(row) for name, row in rows.items()}
    if args.list:
        return Report(
            {name: {"fault": r["fault"], "expect": r["expect"], "skipped": missing(r)} for name, r in rows.items()}
        )
    names = list(rows) if args.run == ["all"] else args.run
    if unknown := [name for name in names if name not in rows]:
        raise CannotMeasure(f"no fault {unknown[0]!r}; there are: {', '.join(rows)}")
    results = {}
    for name in names:
        results[name] = run(rows[name], args.seed, args.keep)
        say(f"{name}: {results[name]['skipped'] or ('as expected' if results[name]['ok'] else 'NOT as expected')}")
    return Report(
        {"rows": results}, [f"{name}: {'; '.join(r['problems'])}" for name, r in results.items() if r["problems"]]
    )
