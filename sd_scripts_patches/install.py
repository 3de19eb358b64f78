"""`./start.sh sd-scripts|musubi`: installs the pinned checkout of a trainer of kohya's and an environment of its own.

Why a second virtual environment: the trainers need huggingface-hub below 1, the GUI needs it above. Neither is ever
left incomplete. The checkout is made under a temporary name and renamed. The environment cannot be moved, so it gets a
stamp file last; one without its stamp is made again, unless somebody else made it: that one is used as it is. A complete
one is put aside while its successor is made, and is back where that fails, as without a network. At the end the guards
are checked, and a training script is started as far as its help: it imports all that a training needs.

Exit codes: 0 ready, 1 with the reason on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from guards import checkpoint, reading, shell
from sd_scripts_patches import __main__ as launcher, trainers
from sd_scripts_patches.trainers import ROOT, TRAINERS, Trainer

START = r".\start.bat" if os.name == "nt" else "./start.sh"
FETCH_LIMIT_S = 1800
START_LIMIT_S = 600.0  # first imports from a slow disk
STALL_LIMIT_S = 60  # git aborts a transfer that is slower than 1 kB/s for this long
STAMP, MARK = ".installed", ".made-by-hangproof"
"""Files in an environment: the digest of what is installed, written last; a mark that it is ours, written first."""


class InstallError(RuntimeError):
    """What failed, where, and what to do."""


def log(text: str) -> None:
    """A line for the person at the terminal."""
    print(f"Hangproof: {text}", file=sys.stderr, flush=True)


def run(command: list[str], what: str, limit_s: float) -> None:
    """Run `command`. Raises InstallError naming `what` when it fails or takes longer than `limit_s`."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,  # venv says there why it fails; ours has the JSON
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise InstallError(f"{what}: {command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{what}: timed out after {limit_s:.0f} s") from error
    if done.returncode:
        raise InstallError(f"{what}: failed, see the messages above (no network? Connect and run it again)")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait while another start installs a trainer: two would remove each other's environment."""
    from filelock import FileLock, Timeout  # as in guards/download.py

    lock = FileLock(ROOT / ".venv.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log("another start installs a trainer; waiting until it ends …")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fetch(folder: Path, trainer: Trainer, url: str = "", commit: str = "") -> bool:
    """Fetch the pinned commit of a trainer into `folder`. Returns False when there is a checkout already.

    A checkout of another commit is not changed: it is the user's, and a run that began on it keeps it. The log says how
    to get the tested one; `check` reports which patches are compatible. url, commit: others than the pinned ones.
    """
    url, commit = url or trainer.url, commit or trainer.commit
    if folder.exists():
        # From its own files: for a folder without .git, such as an unpacked ZIP, git would speak of our own repository.
        head = reading.commit(folder)
        if not head:
            log(
                f"{folder} is not a git checkout, so its version is not known; it is not changed. To get the tested one, "
                f"move this folder away, then {START} {trainer.key}"
            )
        elif head != commit:
            at = f"git -C {shell.word(folder)}"
            log(
                f"{folder} is at commit {head[:8]}, not at the tested {commit[:8]}; it is not changed. To get the tested one: "
                f"{at} fetch --depth 1 {url} {commit} && {at} checkout {commit}, "
                f"then {START} {trainer.key}"
            )
        return False
    temporary = folder.with_name(f".{folder.name}.tmp")  # one that was killed may have left it
    shutil.rmtree(temporary, ignore_errors=True)
    log(f"fetching {trainer.name} {commit[:8]} …")
    stall_limit = ["-c", "http.lowSpeedLimit=1000", "-c", f"http.lowSpeedTime={STALL_LIMIT_S}"]
    try:
        run(["git", "init", "--quiet", str(temporary)], "create the checkout", 60)
        git = ["git", "-C", str(temporary)]
        run([*git, *stall_limit, "fetch", "--quiet", "--depth", "1", url, commit], f"fetch {url}", FETCH_LIMIT_S)
        run([*git, "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"], "check out the files", 300)
        checkpoint.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def requirements(folder: Path, trainer: Trainer) -> str:
    """Return the requirements of a checkout as a file's text, with what the trainer does not list first.

    On Windows with an NVIDIA driver, pip also looks where the CUDA builds of PyTorch are, and prefers them.
    """
    cuda = sys.platform == "win32" and shutil.which("nvidia-smi")
    index = [f"--extra-index-url {trainers.CUDA_INDEX}"] if cuda else []
    try:
        return "\n".join([*index, *trainer.extra, *trainers.requirements(folder)]) + "\n"
    except (ValueError, OSError) as error:
        raise InstallError(f"read the requirements of {trainer.name}: {error}") from error


def interpreter(trainer: Trainer) -> list[str]:
    """Return the command of a Python that the trainer supports. Raises InstallError, which names those found."""
    low, high = trainer.python
    minors = range(high[1], low[1] - 1, -1)
    commands = [[os.environ.get("PYTHON", "")], [sys.executable], *([f"python3.{minor}"] for minor in minors)]
    commands += [["py", f"-3.{minor}"] for minor in minors] if os.name == "nt" else []
    found: list[tuple[int, ...]] = []
    for command in (*commands, ["python3"], ["python"]):
        version = _version(command)
        if version and low <= version[:2] <= high:
            return command
        found += [version] if version and version not in found else []
    has = ", ".join(".".join(map(str, version)) for version in found) or "no other"
    span = f"Python {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    wanted = f"{high[0]}.{high[1]}"
    raise InstallError(
        f"{trainer.name} needs {span}, and this machine has {has}. Install Python {wanted} beside it (python.org; Debian and "
        f"Ubuntu: apt install python{wanted}-venv; with uv: uv python install {wanted}), or set PYTHON=/path/to/python{wanted}, "
        f"then run {START} {trainer.key} again"
    )


def _version(command: list[str]) -> tuple[int, ...]:
    """Return the version of a Python, () when the command is none. Shims of version managers exist and fail."""
    if not command[0] or shutil.which(command[0]) is None:
        return ()
    probe = [*command, "-c", "import sys; print(*sys.version_info[:3])"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    words = done.stdout.split()
    return tuple(map(int, words)) if not done.returncode and len(words) == 3 and all(w.isdigit() for w in words) else ()


def make_environment(folder: Path, wanted: str, trainer: Trainer) -> bool:
    """Create a virtual environment with the requirements text `wanted`. Returns False when it exists already.

    An environment that somebody else made is not changed: its owner installs into it, and `starts` judges it.
    """
    stamp = folder / STAMP
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8").strip() == digest:
        return False
    ours = folder == ROOT / trainer.venv or stamp.exists() or (folder / MARK).exists()
    if not ours and folder.is_dir() and any(folder.iterdir()):
        log(f"{folder} was not made by Hangproof, so it is used as it is and not changed")
        return False
    python = interpreter(trainer)
    log(f"creating the environment {folder.name} with {' '.join(python)} (PyTorch is large) …")
    before = folder.with_name(f"{folder.name}.before")
    if stamp.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        (folder / MARK).touch()
        run([*python, "-m", "venv", str(folder)], f"create the environment {folder}", 600)
        listed = folder / "requirements.txt"
        listed.write_text(wanted, encoding="utf-8")
        own = [str(venv_python(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*own, "-r", str(listed)], f"install the requirements of {trainer.name}", 7200)
        stamp.write_text(digest + "\n", encoding="utf-8")
    except (InstallError, OSError, KeyboardInterrupt):
        shutil.rmtree(folder, ignore_errors=True)
        if before.is_dir():
            before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)
    return True


def starts(folder: Path, environment: Path, trainer: Trainer) -> str:
    """Start a training script with the guards, as far as its help. Returns why it does not start, or ""."""
    log(f"starting {trainer.script} for its help …")
    command = [venv_python(environment), "-m", "sd_scripts_patches", folder / trainer.script, "--help"]
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_LIMIT_S,
            check=False,
        )
    except OSError as error:
        return f"{trainer.script} cannot be started with {command[0]}: {error.strerror or error}"
    except subprocess.TimeoutExpired:
        return f"{trainer.script} did not print its help within {START_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
    return f"{trainer.script} does not start with {command[0]}: {lines[-1][:300]}"


def venv_python(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def main(argv: list[str] | None = None) -> int:
    """Fetch, install and check. `--json`: the last line has trainer, folder, environment, commit, new, failed."""
    parser = argparse.ArgumentParser(prog=START, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    arguments = parser.parse_args(argv)
    trainer = TRAINERS[arguments.trainer]
    folder, environment = trainer.checkout, trainer.environment
    new = False
    try:
        with alone() if os.access(ROOT, os.W_OK) else contextlib.nullcontext():
            new = fetch(folder, trainer)
            new |= make_environment(environment, requirements(folder, trainer), trainer)
    except (InstallError, OSError, KeyboardInterrupt) as error:
        failed = f"{str(error) or 'interrupted'}. No incomplete files were left"
        print(f"{trainer.key}: {failed}.", file=sys.stderr)
    else:
        checked = launcher.main(["check", str(folder)]) == 0
        failed = starts(folder, environment, trainer) if checked else "the check of the patches failed, see above"
        log(f"{trainer.name} is ready in {folder}" if not failed else f"{folder} is not ready: {failed}")
    if arguments.json:
        values = {"folder": str(folder), "environment": str(environment), "commit": trainer.commit}
        print(json.dumps({"trainer": trainer.key, **values, "new": new, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
