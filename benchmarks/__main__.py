"""`python -m benchmarks NAME …`: measure, and print one JSON object.

A benchmark is a module of this name with `options(parser)`, its arguments, and `measure(arguments)`, its report. The
object has the figures, the machine, `exceeded` (a sentence for each limit that is exceeded) and `ok`. Exit codes: 0
within all limits; 1 not; 2 wrong usage, or a machine that cannot measure this.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys

from benchmarks.report import CannotMeasure, machine, say

NAMES = {
    "chaos": "the monitor under errors of its own calls and SIGKILL: no run is lost",
    "examples": "the built-in trainer beside diffusers' example scripts: losses and time of a step",
    "faults": "every fault a run can meet, injected on purpose, and its required outcome",
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
    arguments = parser.parse_args(argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a SIGTERM cleans up too
    try:
        report = module.measure(arguments)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
