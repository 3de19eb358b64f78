"""Runs the tests on kohya's real code once for each checkout that is named, the long ones too.

    .venv/bin/python tests/on_checkouts.py sd-scripts@.venv-sd-scripts musubi-tuner@.venv-musubi [-- -k resume]

A word is CHECKOUT or CHECKOUT@ENVIRONMENT; without an environment, the installed one is used. Words after `--` go to pytest.
Exit codes: 0 all passed, 1 a test failed or nothing ran, 2 a folder is not a checkout of a trainer.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))

from sd_scripts_patches import trainers  # noqa: E402

HELPERS = {"sd-scripts": "tiny_sd_scripts", "musubi": "tiny_musubi"}  # what a test imports to train with a trainer


def files(trainer: str) -> list[str]:
    """The test files that train with a trainer."""
    return [
        str(path) for path in sorted(TESTS.glob("test_*.py")) if f"import {HELPERS[trainer]}" in path.read_text("utf-8")
    ]


def environment(trainer: trainers.Trainer, checkout: Path, venv: str) -> dict[str, str]:
    """The variables that name this checkout to the tests, and no checkout of another trainer."""
    none = {one.folder_variable: str(TESTS / "none") for one in trainers.TRAINERS.values()}
    named = {trainer.folder_variable: str(checkout), trainer.venv_variable: venv or str(trainer.environment)}
    return {**os.environ, **none, **named}


def main(words: list[str]) -> int:
    """Run the tests for each checkout."""
    cut = words.index("--") if "--" in words else len(words)
    named, more = words[:cut], words[cut + 1 :]
    found = []
    for word in named:
        folder, _, venv = word.partition("@")
        checkout = Path(folder).resolve()
        trainer = trainers.of(checkout)
        if trainer is None:
            print(f"{folder}: not a checkout of sd-scripts or musubi-tuner; name its folder", file=sys.stderr)
            return 2
        found.append((trainer, checkout, str(Path(venv).absolute()) if venv else ""))
    if not found:
        print(__doc__, file=sys.stderr)
        return 2
    failed = []
    for trainer, checkout, venv in found:
        print(f"== {trainer.name}: {checkout}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "long or not long", *files(trainer.key), *more]
        if subprocess.run(command, cwd=TESTS.parent, env=environment(trainer, checkout, venv), check=False).returncode:
            failed.append(str(checkout))
    print(f"failed with: {', '.join(failed)}" if failed else "passed with every checkout")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
