"""`python -m benchmarks NAME …`: measure, and print one JSON object.

A benchmark is a module of this name with `options(parser)`, its arguments, and `measure(arguments)`, its report. The
object has the figures, the machine, `exceeded` (a sentence for each limit that is exceeded) and `ok`. Exit codes: 0
within all limits; 1 not; 2 wrong usage, or a machine that cannot measure this.

`--against DIR` compares with a checkout of another commit: the same command there and here, in turns, so that other
programs affect both. The object then has `ratios`, ours / theirs of each figure that differs, and no limit applies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import CannotMeasure, Report, machine, ratio, say
from runs.paths import ROOT

PAIRS = 3

NAMES = {
    "chaos": "the monitor under errors of its own calls and SIGKILL: no run is lost",
    "goodput": "a run under faults: ours, torchrun, nvidia-resiliency-ext",
    "gpu": "on a GPU: every VRAM tier at full size, exact resume, hangs of the card, kohya's trainer, snapshots",
    "overhead": "what the guards cost: a heartbeat, and all patches in the real loop",
    "ui": "how fast the page answers, and how much memory it uses",
}


def main(argv: list[str]) -> int:
    """Exit code as the module says."""
    if not argv or argv[0] not in NAMES:
        lines = "\n".join(f"  {name:<12} {what}" for name, what in NAMES.items())
        wanted = bool(argv) and argv[0] in ("-h", "--help")
        print(f"python -m benchmarks NAME [--help | arguments]\n{lines}", file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    name, module = argv[0], importlib.import_module(f"benchmarks.{argv[0]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=module.__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    module.options(parser)
    parser.add_argument("--json", action="store_true", help="the object on one line, the last one")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of another commit to compare with")
    arguments = parser.parse_args(argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a SIGTERM cleans up too
    try:
        report = against(arguments.against.resolve(), argv) if arguments.against else module.measure(arguments)
    except CannotMeasure as reason:
        say(f"benchmarks {name}: {reason}")
        return 2
    except KeyboardInterrupt:
        say(f"benchmarks {name}: interrupted; nothing of it is left running")
        return 130
    for line in report.exceeded:
        say(f"benchmarks {name}: {line}")
    found = {"machine": machine(), **report.figures, "exceeded": report.exceeded, "ok": not report.exceeded}
    print(json.dumps(found, indent=None if arguments.json else 1, ensure_ascii=False))
    return 1 if report.exceeded else 0


def against(other: Path, argv: list[str]) -> Report:
    """The ratios of PAIRS pairs; each pair swaps who is first."""
    pairs: list[dict[Path, dict[str, float]]] = [{} for _ in range(PAIRS)]
    for turn, pair in enumerate(pairs):
        for checkout in (ROOT, other) if turn % 2 == 0 else (other, ROOT):
            say(f"pair {turn + 1} of {PAIRS}: {checkout}")
            pair[checkout] = dict(figures_of(measured(checkout, argv)))
    ratios = {key: ratio((pair[ROOT].get(key), pair[other].get(key)) for pair in pairs) for key in pairs[0][ROOT]}
    return Report({"ratios": {key: one for key, one in ratios.items() if one and {one["low"], one["high"]} != {1.0}}})


def measured(checkout: Path, argv: list[str]) -> dict[str, Any]:
    """What the command prints in this checkout. Raises CannotMeasure where it prints nothing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--against")
    command = [sys.executable, "-m", "benchmarks", *parser.parse_known_args(argv)[1], "--json"]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise CannotMeasure(f"{checkout} printed no figures; its exit code is {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def figures_of(values: dict[str, Any], within: str = "") -> Iterator[tuple[str, float]]:
    """Each number of nested objects, with its path: `contenders.ours.goodput`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from figures_of(value, f"{within}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{within}{key}", value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
