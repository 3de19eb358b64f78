"""One word in front of every command: `hangproof status cat` is `python -m monitor status cat`.

`setup.sh` writes a console script of this name into the environment; from outside it, `./start.sh status cat` does the same. Paths
among the words are those of the folder that you are in.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# module → its own commands
COMMANDS = {
    "monitor": (
        "run", "start", "status", "stop", "sample", "save", "pause", "resume", "resume-all", "notify", "diagnose",
        "metrics",
    ),
    "runs": ("new", "show", "estimate", "render", "rename", "fields", "fetch-model"),
    "jobs": ("queue", "sweep", "delete"),
    "presets": ("list", "lint"),
    "launch": (
        "slurm", "skypilot", "docker", "runpod", "vast", "publish", "bundle", "rehearse", "drill", "fleet", "store",
        "train", "serve", "stop-pod",
    ),
    "sd_scripts_patches": ("check",),
}  # fmt: skip
# word → Python's arguments
OTHERS = {
    "demo": ["-m", "launch", "drill"],
    "doctor": ["doctor.py"],
    "sd-scripts": ["-m", "sd_scripts_patches.install", "sd-scripts"],
    "musubi": ["-m", "sd_scripts_patches.install", "musubi"],
}
USAGE = """usage: hangproof COMMAND ...        (or {start} COMMAND ...; without a command, {start} serves the page)

  runs         {runs}
  supervision  {monitor}
  jobs         {jobs}
  presets      {presets}
  elsewhere    {launch}
  trainers     sd-scripts, musubi (install), {sd_scripts_patches}
  other        demo, doctor

hangproof COMMAND --help explains one.
"""


def arguments(word: str) -> list[str] | None:
    """Python's arguments for a command; None for a word that is none."""
    if word in OTHERS:
        first, *rest = OTHERS[word]
        return [first if first == "-m" else str(ROOT / first), *rest]
    return next((["-m", module, word] for module, words in COMMANDS.items() if word in words), None)


def main(words: list[str]) -> int:
    """Run the command in this process's place (Windows: as a child). Exit code: the command's; 2: there is none such."""
    command = arguments(words[0]) if words else None
    if command is None:
        start = r".\start.bat" if os.name == "nt" else "./start.sh"
        usage = USAGE.format(start=start, **{module: ", ".join(names) for module, names in COMMANDS.items()})
        asked = words[:1] in (["-h"], ["--help"])
        if words and not asked:
            usage = f"hangproof: {words[0]!r} is not a command\n{usage}"
        print(usage, end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    line, environment = [sys.executable, *command, *words[1:]], {**os.environ, "PYTHONPATH": path}
    if os.name == "nt":
        signal.signal(signal.SIGINT, lambda *_: None)  # the child gets the terminal's Ctrl-C, too, and answers it
        return subprocess.call(line, env=environment)
    os.execve(sys.executable, line, environment)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
