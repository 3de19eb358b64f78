"""`./start.sh sd-scripts`: installs the pinned checkout of kohya's sd-scripts and an environment of its own.

Why a second virtual environment: sd-scripts needs huggingface-hub below 1, the GUI needs it above. Neither is ever left
incomplete. The checkout is made under a temporary name and renamed. The environment cannot be moved, so it gets a stamp
file last; one without its stamp is made again. At the end the self-test trains tiny weights with both.

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
COMMIT = "6721028c79ee85a78b3a06dfd8954dae310a1cce"  # v0.11.1; v0.10.1 and later commits are tested, too
# sd-scripts leaves torch to its user, and imports torchvision without listing it.
EXTRA = ("torch==2.13.0", "torchvision==0.28.0")
FETCH_LIMIT_S = 1800
STALL_LIMIT_S = 60  # git aborts a transfer that is slower than 1 kB/s for this long


class InstallError(RuntimeError):
    """What failed, where, and what to do."""


def log(text: str) -> None:
    print(f"Hangproof: {text}", file=sys.stderr, flush=True)


def run(command: list[str], what: str, limit_s: float, cwd: Path | None = None) -> str:
    """Return the output of `command`. Raises InstallError naming `what` when it fails or takes longer than `limit_s`."""
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
        raise InstallError(f"{what}: timed out after {limit_s:.0f} s") from error
    if done.returncode:
        raise InstallError(f"{what}: failed, see the messages above (no network? Connect and run it again)")
    return done.stdout.decode("utf-8", "replace")


def fetch(folder: Path, url: str = URL, commit: str = COMMIT) -> bool:
    """Fetch `commit` of `url` into `folder`. Returns False when there is a checkout already.

    A checkout of another commit is not changed: it is the user's, and a run that began on it keeps it. The log says how to
    get the tested one; `check` reports which patches are compatible.
    """
    if folder.exists():
        head = run(["git", "-C", str(folder), "rev-parse", "HEAD"], f"read the checkout {folder}", 60).strip()
        if head != commit:
            log(
                f"{folder} is at commit {head[:8]}, not at the tested {commit[:8]}; it is not changed. To get the tested one: "
                f"git -C '{folder}' fetch --depth 1 {url} {commit} && git -C '{folder}' checkout {commit}, "
                "then ./start.sh sd-scripts. To compare both first: python -m sd_scripts_patches canary OLD NEW"
            )
        return False
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    log(f"fetching sd-scripts {commit[:8]} …")
    stall_limit = ["-c", "http.lowSpeedLimit=1000", "-c", f"http.lowSpeedTime={STALL_LIMIT_S}"]
    try:
        run(["git", "init", "--quiet", str(temporary)], "create the checkout", 60)
        git = ["git", "-C", str(temporary)]
        run([*git, *stall_limit, "fetch", "--quiet", "--depth", "1", url, commit], f"fetch {url}", FETCH_LIMIT_S)
        run([*git, "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"], "check out the files", 300)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def requirements(folder: Path, extra: tuple[str, ...] = EXTRA) -> str:
    """Return the checkout's requirements with `extra` first, without the line that installs the checkout itself."""
    lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join([*extra, *(line for line in lines if line.strip() != "-e .")]) + "\n"


def make_environment(folder: Path, wanted: str) -> bool:
    """Create a virtual environment with the requirements text `wanted`. Returns False when it exists already."""
    stamp = folder / ".installed"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8").strip() == digest:
        return False
    log(f"creating the environment {folder.name} (PyTorch is large) …")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=True)
        listed = folder / "requirements.txt"
        listed.write_text(wanted, encoding="utf-8")
        python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(listed)]
        run(pip, "install the requirements of sd-scripts", 7200)
        stamp.write_text(digest + "\n", encoding="utf-8")
    except (InstallError, OSError, subprocess.CalledProcessError, KeyboardInterrupt):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return True


def verify(folder: Path, environment: Path) -> str:
    """Check the guards, then train tiny weights. Returns what failed, "" when all is well; both print their findings."""
    variables = {**os.environ, "SD_SCRIPTS_VENV": str(environment.absolute())}
    command = [sys.executable, "-m", "sd_scripts_patches"]
    if subprocess.run([*command, "check", str(folder)], cwd=ROOT, env=variables, check=False).returncode:
        return "the check of the patches"
    log("self-test: training tiny random weights, about one minute …")
    done = subprocess.run([*command, "selftest", str(folder)], cwd=ROOT, env=variables, check=False)
    return "the self-test" if done.returncode else ""


def main(argv: list[str] | None = None) -> int:
    """Fetch, install and check. `--json`: the last line of output is {"folder", "environment", "commit", "new", "failed"}."""
    parser = argparse.ArgumentParser(prog="./start.sh sd-scripts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    arguments = parser.parse_args(argv)
    folder = Path(os.environ.get("SD_SCRIPTS_DIR") or ROOT / "sd-scripts")
    environment = Path(os.environ.get("SD_SCRIPTS_VENV") or ROOT / ".venv-sd-scripts")
    try:
        fetched = fetch(folder)
        made = make_environment(environment, requirements(folder))
    except (InstallError, OSError) as error:
        print(f"sd-scripts: {error}. No incomplete files were left.", file=sys.stderr)
        return 1
    failed = verify(folder, environment)
    log(f"sd-scripts is ready in {folder}" if not failed else f"{failed} failed with {folder}, see above")
    if arguments.json:
        values = {"folder": str(folder), "environment": str(environment), "commit": COMMIT, "new": fetched or made}
        print(json.dumps({**values, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
