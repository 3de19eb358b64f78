"""Which version of a trainer a run began on, which one its checkout holds now, and the way back to the other.

A run's folder remembers the commits it ran on (`trainer.json`), so that an update between two attempts is seen and
said. A commit is read from git's own files: the trainer's environment may have no git, and another user's folder is
refused by it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from guards.checkpoint import atomic_write
from guards.reading import commit, number
from sd_scripts_patches import compatibility
from sd_scripts_patches.trainers import TRAINERS, Trainer

FILE = "trainer.json"
GIT_LIMIT_S, FETCH_LIMIT_S = 300, 1800


class VersionError(RuntimeError):
    """What cannot be done with a checkout, and what to do instead."""


@dataclass
class Record:
    """What a run remembers. trainer: its key. commits: the ones it ran on, each once in a row, the latest last."""

    trainer: str
    checkout: str
    commits: list[str] = field(default_factory=list)


def used(run: Path) -> Record | None:
    """Return what a run's folder remembers, None when it remembers nothing that can be read."""
    try:
        content = json.loads((run / FILE).read_text(encoding="utf-8"))
        return Record(str(content["trainer"]), str(content["checkout"]), [str(one) for one in content["commits"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record(run: Path, trainer: Trainer, checkout: Path) -> str:
    """Note in a run's folder which commit it runs on. Returns a line for the log when that is not the one before."""
    now, known = commit(checkout), used(run)
    if not now:
        return ""
    before = known.commits if known and known.trainer == trainer.key else []
    if before[-1:] == [now]:
        return ""
    content = asdict(Record(trainer.key, str(checkout), [*before, now]))
    atomic_write(run / FILE, json.dumps(content))
    if not before:
        return ""
    return (
        f"this run began on {trainer.name} {before[0][:8]}, its last attempt used {before[-1][:8]}, and it continues on "
        f"{now[:8]}. To see which guards fit it: python -m sd_scripts_patches check {shlex.quote(str(checkout))}"
    )


def on_start(found: compatibility.Checkout) -> str:
    """Note the commit of this training in its run's folder. Returns a line for the log, or ""."""
    run = os.environ.get("HANGPROOF_RUN", "")
    if not run or number("RANK", 0):
        return ""
    trainer = next(one for one in TRAINERS.values() if one.name == found.trainer)
    root = next((folder for folder in (found.source, found.source.parent) if (folder / ".git").exists()), found.source)
    try:
        return record(Path(run), trainer, root)
    except OSError as error:  # the training itself says what is wrong with its folder
        return f"the version of {trainer.name} could not be noted in {run}: {error}"


def has(checkout: Path, wanted: str) -> bool:
    """Return True when the checkout's repository holds a commit. Raises VersionError when git cannot be run there."""
    git(checkout, "rev-parse", "--git-dir")
    try:
        git(checkout, "cat-file", "-e", f"{wanted}^{{commit}}")
    except VersionError:
        return False
    return True


def way_back(checkout: Path, trainer: Trainer, wanted: str) -> list[list[str]]:
    """Return the commands that put a checkout to a commit and change nothing else.

    Raises VersionError when files of the checkout were changed by hand: these changes might be lost.
    """
    changed = [line[3:] for line in git(checkout, "status", "--porcelain", "--untracked-files=no").splitlines()]
    if changed:
        names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise VersionError(
            f"{checkout} has files that were changed by hand ({names}). Commit them, or undo the changes with "
            f"git -C {shlex.quote(str(checkout))} checkout -- . and try again"
        )
    base = ["git", "-C", str(checkout)]
    commands = []
    if not has(checkout, wanted):
        shallow = git(checkout, "rev-parse", "--is-shallow-repository").strip() == "true"
        commands.append([*base, "fetch", *(["--depth", "1"] if shallow else []), trainer.url, wanted])
    return [*commands, [*base, "checkout", "--detach", wanted]]


def go_back(checkout: Path, trainer: Trainer, wanted: str) -> None:
    """Run the commands of `way_back`. Raises VersionError with git's own message."""
    for command in way_back(checkout, trainer, wanted):
        git(checkout, *command[3:], limit_s=FETCH_LIMIT_S)
    if commit(checkout) != wanted:
        raise VersionError(
            f"{checkout} is at commit {commit(checkout)[:8]} and not at {wanted[:8]}; look at it with git"
        )


def git(checkout: Path, *words: str, limit_s: float = GIT_LIMIT_S) -> str:
    """Return the output of a git command in a checkout. Raises VersionError with git's last line."""
    command = ["git", "-C", str(checkout), *words]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    environment["GIT_CEILING_DIRECTORIES"] = str(checkout.parent)  # never the repository around a folder that is none
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except FileNotFoundError as error:
        raise VersionError("git is not installed; install it, then run the command again") from error
    except subprocess.TimeoutExpired as error:
        raise VersionError(f"git {words[0]} in {checkout} took longer than {limit_s:.0f} s") from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise VersionError(f"git {words[0]} in {checkout} failed: {lines[-1]}")
    return done.stdout.decode("utf-8", "replace")


def main(argv: list[str]) -> int:
    """`python -m sd_scripts_patches.versions TRAINER COMMIT`: put a checkout to a commit; 1 with the reason."""
    key, wanted = argv
    try:
        go_back(TRAINERS[key].checkout, TRAINERS[key], wanted)
    except VersionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
