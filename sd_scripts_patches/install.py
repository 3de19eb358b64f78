"""`./start.sh sd-scripts`: the pinned checkout of kohya's sd-scripts and an environment of its own, or nothing at all.

Decision: a second virtual environment, because sd-scripts needs huggingface-hub below 1 and the page needs it above. Both
are built aside or removed on failure, so what stands under its final name is whole: the checkout is renamed into place, the
environment (which cannot be moved) gets a stamp written last, and one without its stamp is made anew.

Exit codes: 0 ready, 1 with the reason on standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
URL = "https://github.com/kohya-ss/sd-scripts.git"
COMMIT = "48d368fa557731ad0488c07304dfeba8c07910eb"  # v0.10.1, the version that the patches are tested on
# sd-scripts leaves torch to its user, and imports torchvision without listing it.
EXTRA = ("torch==2.13.0", "torchvision==0.28.0")
FETCH_LIMIT_S = 1800
QUIET_LIMIT_S = 60  # git gives up a transfer that moves under 1 kB/s for this long


class InstallError(RuntimeError):
    """What could not be done, where, and what to do."""


def say(text: str) -> None:
    print(f"Hangproof: {text}", file=sys.stderr, flush=True)


def run(command: list[str], what: str, limit_s: float, cwd: Path | None = None) -> str:
    """Standard output of `command`; InstallError naming `what` when it fails or outlasts `limit_s` seconds."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise InstallError(f"{what}: {command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{what}: gave up after {limit_s:.0f} s") from error
    if done.returncode:
        raise InstallError(f"{what}: failed, see above (no network? then try again once there is one)")
    return done.stdout.decode("utf-8", "replace")


def fetch(folder: Path, url: str = URL, commit: str = COMMIT) -> bool:
    """Put `commit` of `url` at `folder`; True when it was fetched, False when a checkout already stood there.

    A checkout of another commit is left as it is: it is the user's, and `check` says what fits it.
    """
    if folder.exists():
        head = run(["git", "-C", str(folder), "rev-parse", "HEAD"], f"read the checkout {folder}", 60).strip()
        if head != commit:
            say(f"{folder} is at commit {head[:8]}, not the tested {commit[:8]}; it is left as it is")
        return False
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    say(f"fetching sd-scripts {commit[:8]} …")
    patience = ["-c", "http.lowSpeedLimit=1000", "-c", f"http.lowSpeedTime={QUIET_LIMIT_S}"]
    try:
        run(["git", "init", "--quiet", str(temporary)], "make the checkout", 60)
        git = ["git", "-C", str(temporary)]
        run([*git, *patience, "fetch", "--quiet", "--depth", "1", url, commit], f"fetch {url}", FETCH_LIMIT_S)
        run([*git, "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"], "check it out", 300)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def requirements(folder: Path, extra: tuple[str, ...] = EXTRA) -> str:
    """The checkout's own requirements, without the line that installs the checkout itself, and with `extra` first."""
    lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join([*extra, *(line for line in lines if line.strip() != "-e .")]) + "\n"


def make_environment(place: Path, wanted: str) -> bool:
    """A virtual environment at `place` with the requirements text `wanted`; True when made, False when it was there."""
    stamp = place / ".installed"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8").strip() == digest:
        return False
    say(f"making its environment {place.name} (PyTorch is large) …")
    shutil.rmtree(place, ignore_errors=True)
    try:
        venv.create(place, with_pip=True)
        listed = place / "requirements.txt"
        listed.write_text(wanted, encoding="utf-8")
        python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(listed)]
        run(pip, "install sd-scripts' requirements", 7200)
        stamp.write_text(digest + "\n", encoding="utf-8")
    except (InstallError, OSError, subprocess.CalledProcessError, KeyboardInterrupt):
        shutil.rmtree(place, ignore_errors=True)
        raise
    return True


def main(argv: list[str] | None = None) -> int:
    """Fetch, build, check. `--json`: the last line of standard output is {"folder", "environment", "commit", "new"}."""
    parser = argparse.ArgumentParser(prog="./start.sh sd-scripts", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end standard output with one line of JSON")
    arguments = parser.parse_args(argv)
    folder = Path(os.environ.get("SD_SCRIPTS_DIR") or ROOT / "sd-scripts")
    place = Path(os.environ.get("SD_SCRIPTS_VENV") or ROOT / ".venv-sd-scripts")
    try:
        fetched = fetch(folder)
        made = make_environment(place, requirements(folder))
    except (InstallError, OSError) as error:
        print(f"sd-scripts: {error}. Nothing half-made was left.", file=sys.stderr)
        return 1
    fits = subprocess.run([sys.executable, "-m", "sd_scripts_patches", "check", str(folder)], cwd=ROOT, check=False)
    say(f"sd-scripts is ready in {folder}" if fits.returncode == 0 else f"some patches do not fit {folder}, see above")
    if arguments.json:
        print(json.dumps({"folder": str(folder), "environment": str(place), "commit": COMMIT, "new": fetched or made}))
    return fits.returncode


if __name__ == "__main__":
    raise SystemExit(main())
