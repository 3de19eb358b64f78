"""The fault matrix: put a fault into a real run of the embedded trainer, and compare what comes of it with the table.

    python -m benchmarks faults --list [--json]
    python -m benchmarks faults --run NAME [--json] [--seed N] [--keep DIR]

Decision: the table (`faults.toml`) says what must happen, in the words of the monitor's own files; nothing here knows a fault
by name. Each row runs the real monitor, launcher and trainer on a tiny model at 50 ms a step. The same seed strikes at the
same step. `--run all` runs every row. Exit code 0: it all went as the table says (or cannot be done on this machine, which
is said); 1: it did not, with what was expected and what came; 2: no such fault.

Afterwards no process and no file of it is left, Ctrl-C included; `--keep DIR` keeps the run's folder and the monitors' words.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path

import tomllib

from benchmarks.faults_acts import ACTS
from benchmarks.faults_reference import NAME, sha256
from benchmarks.faults_scene import Scene, Wrong, is_root, stage
from benchmarks.faults_words import expected, tell
from benchmarks.injector import STRUCK

DETECT_S = 10.0
SLACK_S = 5.0
LORA = f"{NAME}.safetensors"


def table() -> dict[str, dict]:
    """The rows of the matrix by name, in order."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: {"name": name, **row} for name, row in rows.items()}


def missing(row: dict) -> str:
    """Why the row cannot be done on this machine; "" when it can."""
    for need in row.get("needs", []):
        if need == "linux":
            if not sys.platform.startswith("linux"):
                return "Linux only"
        elif need == "root":
            if not is_root():
                return "only root may mount a file system"
        elif need == "loop":
            if not Path("/dev/loop-control").exists():
                return "no loop devices here, so no file system to freeze"
        elif shutil.which(need) is None:
            return f"{need} is not installed"
    return ""


def compare(scene: Scene) -> list[str]:
    """What is not as the row promises; [] when all is."""
    want, status = scene.row["expect"], scene.status()
    wrong = []

    def check(what: str, seen: object, expected: object) -> None:
        if seen != expected:
            wrong.append(f"{what}: {seen!r}, expected {expected!r}")

    check("state", status.get("state"), want["state"])
    check("exit code", scene.codes[-1], want["code"])
    least, most = want["restarts"] if isinstance(want["restarts"], list) else [want["restarts"]] * 2
    if not least <= status.get("restarts", -1) <= most:
        wrong.append(f"restarts: {status.get('restarts')}, expected {want['restarts']}")
    if "changes" in want:
        check("changes of the run", len(status.get("changes", [])), want["changes"])
    if "inject" in scene.row and STRUCK not in _tail(scene.folder / "training.log", 10_000_000):
        wrong.append("the fault never struck, so nothing was tested")
    wrong += [
        f"{mark}: nobody asked it, so nothing was tested" for mark in want.get("asked", []) if not scene.asked(mark)
    ]
    wrong += _incidents(scene, want) + _checkpoints(scene, want) + _lora(scene, want)
    if want["state"] != "unkillable" and (left := _left(scene)):
        wrong.append(f"left running: {left}")
    return wrong


def _left(scene: Scene) -> dict[int, str]:
    """What still runs; a helper that was told to end is given a moment for it."""
    deadline = time.monotonic() + scene.slack_s
    while (left := scene.ours()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _incidents(scene: Scene, want: dict) -> list[str]:
    found, wrong = scene.incidents(), []
    seen = [incident["cause"] for incident in found]
    expected = want.get("incidents")
    if isinstance(expected, int):
        if len(found) != expected:
            wrong.append(f"incidents: {seen}, expected {expected} of them")
    elif expected is not None and not _same(seen, expected):
        wrong.append(f"incidents: {seen}, expected {expected}")
    for incident in found:
        # On a machine that is busy the steps were slow before the fault, and the monitor has learned to be patient; while
        # it sees that others keep the processor busy, it is eight times as patient (`slow_times`).
        times = 8 if any("keep the processor busy" in e["message"] for e in scene.events("slow")) else 2
        budget_s = times * incident["evidence"].get("budget_s", 0.0)
        within = max(want.get("detect_s", DETECT_S), budget_s + scene.slack_s)
        if incident["kind"] == "hang" and incident["detect_s"] > within:
            wrong.append(f"the hang was declared after {incident['detect_s']:.1f} s, expected within {within:.1f}")
    for incident, report in zip(found, scene.reports(), strict=False):
        if incident["title"] not in report or "{" in report.split("```")[0]:
            wrong.append(f"report.md of incident {incident['id']} does not say {incident['title']!r} in plain words")
    if len(scene.reports()) != len(found):
        wrong.append(f"{len(found)} incidents, but {len(scene.reports())} reports")
    return wrong


def _same(causes: list[str], expected: list[list[str]]) -> bool:
    return len(causes) == len(expected) and all(c in names for c, names in zip(causes, expected, strict=True))


def _checkpoints(scene: Scene, want: dict) -> list[str]:
    told = [event["message"] for event in scene.events("checkpoint_bad")]
    wrong = [
        f"no word of a bad checkpoint with {word!r}: {told}"
        for word in want.get("set_aside", [])
        if not any(word in t for t in told)
    ]
    if len(told) != len(want.get("set_aside", [])) and "set_aside" in want:
        wrong.append(f"checkpoints set aside: {told}, expected {len(want['set_aside'])}")
    if "set_aside" in want and not list(scene.folder.glob("*-state.bad*")):
        wrong.append("the bad checkpoint is not there under another name")
    return wrong


def _lora(scene: Scene, want: dict) -> list[str]:
    path = scene.folder / LORA
    if want["lora"] == "any":
        return []
    if want["lora"] == "none":
        return [f"{LORA} is there, though the training did not finish"] if path.exists() else []
    if not path.exists():
        return [f"{LORA} is not there"]
    wrong = []
    if sha256(path) != scene.reference.sha256:
        wrong.append(f"{LORA} is not that of the undisturbed run, bit for bit")
    trained = {step["step"] for step in scene.steps()}
    if trained != set(range(1, scene.reference.steps + 1)):
        wrong.append(f"steps trained: {len(trained)} of {scene.reference.steps}")
    return wrong


def run(
    row: dict, seed: int = 0, keep: Path | None = None, kind: type[Scene] = Scene, slack_s: float = SLACK_S
) -> dict:
    """Play a row; {"name", "seed", "ok", "skipped", "problems", "seen", "kept", "seconds"}.

    keep: a folder in which the run's own is kept; without it nothing is left. slack_s: what a busy machine may add to the
    seconds that the row promises; tests give much, because they ask what happens, not how fast.
    """
    began = time.monotonic()
    result = {"name": row["name"], "seed": seed, "ok": True, "skipped": missing(row), "problems": [], "seen": {}}
    if result["skipped"]:
        return {**result, "seconds": 0.0}
    with stage(row, seed, keep, kind) as scene:
        scene.slack_s = slack_s
        try:
            ACTS[row.get("act", "watch")](scene)
            result["problems"] = compare(scene) + scene.compare()
        except Wrong as wrong:
            result["problems"] = [str(wrong)]
        result["seen"] = seen(scene)
        if result["problems"]:
            result["monitor_log"] = _tail(scene.folder / "monitor.log", 40)
            result["training_log"] = _tail(scene.folder / "training.log", 25)
            result["monitor_said"] = [_tail(path, 15) for path in sorted(scene.root.glob("monitor-*.txt"))]
        if keep is not None:
            result["kept"] = str(scene.root)
    return {**result, "ok": not result["problems"], "seconds": round(time.monotonic() - began, 1)}


def seen(scene: Scene) -> dict:
    """What came of it, from the run's own files."""
    status = scene.status()
    keys = ("cause", "kind", "phase", "step", "resumed_from", "steps_repeated", "detect_s", "recover_s", "changed")
    return {
        **{key: status.get(key) for key in ("state", "step", "restarts", "attempt", "message")},
        "codes": scene.codes,
        "fault_step": scene.environment.get("HANGPROOF_FAULT_STEP"),
        "incidents": [{key: incident.get(key) for key in keys} for incident in scene.incidents()],
        "lora": _lora_words(scene),
    }


def _lora_words(scene: Scene) -> str:
    path = scene.folder / LORA
    if not path.exists():
        return "no LoRA"
    if not scene.reference.sha256:
        return "a LoRA"
    same = sha256(path) == scene.reference.sha256
    return "the LoRA of an undisturbed run, bit for bit" if same else "a LoRA that is NOT that of an undisturbed run"


def _tail(path: Path, lines: int) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def main(argv: list[str] | None = None) -> int:
    """Exit code as the module says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the faults, and what must come of each")
    what.add_argument("--run", metavar="NAME", action="append", help="a fault of the list, or all")
    parser.add_argument("--json", action="store_true", help="end standard output with one line of JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the run's folder and the monitors' words in DIR")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that who ends this from outside leaves nothing either
    rows = table()
    if arguments.list:
        for name, row in rows.items():
            print(f"{name:<28} {row['fault']}" + (f" (skipped here: {missing(row)})" if missing(row) else ""))
            print(f"{'':<28} → {expected(row)}")
        if arguments.json:
            print(json.dumps(list(rows)))
        return 0
    names = list(rows) if arguments.run == ["all"] else arguments.run
    unknown = [name for name in names if name not in rows]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are: {', '.join(rows)}", file=sys.stderr)
        return 2
    results = []
    for name in names:
        try:
            results.append(run(rows[name], arguments.seed, arguments.keep))
        except KeyboardInterrupt:
            print(f"{name}: ended before its end; nothing of it is left running", file=sys.stderr)
            return 130
        print(tell(rows[name], results[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(results if len(results) > 1 else results[0]))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
