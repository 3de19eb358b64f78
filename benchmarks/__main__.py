"""`python -m benchmarks NAME …`: the module `benchmarks.NAME` and its `main(argv)`."""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "chaos": "the monitor under errors of its own calls and SIGKILL: no run is lost",
    "dataset": "how quick step 2 stays with 10,000 images, and how fast photos are taken in",
    "faults": "every fault a run can meet, injected on purpose, and its required outcome",
    "loading": "how long the weights of a real-size FLUX take to load, page cache warm and cold",
    "goodput": "a run under faults: ours, torchrun, nvidia-resiliency-ext",
    "overhead": "what the guards cost: a heartbeat, and all patches in the real loop",
    "preemption": "everything of a run is killed at random moments; an empty machine continues from the store",
    "ranks": "one of four ranks hangs: is it named, with its place, and does the run finish?",
    "runs": "how fast 1,000 runs on disk are listed, shown and resumed",
    "slowdown": "runs made slow by each cause: is it named right, and is an ordinary run ever called slow?",
    "snapshots": "what snapshots in memory cost, in steps of one second with a LoRA of FLUX's size",
    "two_machines": "two machines start one run, their links are cut at random: is there ever a second writer?",
    "ui": "how fast the page answers, and how much memory it uses",
}


def main(argv: list[str]) -> int:
    """Exit code of the named benchmark; 2 when there is none of that name."""
    if argv and argv[0] in NAMES:
        return importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    lines = "\n".join(f"  {name:<12} {what}" for name, what in NAMES.items())
    wanted = argv and argv[0] in ("-h", "--help")
    print(f"python -m benchmarks NAME [--help | arguments]\n{lines}", file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
