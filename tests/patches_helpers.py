"""Run a small module, or sd-scripts itself, under the patches, and say how it ended and how long it took."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tiny_sd_scripts as tiny

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ended:
    """code: exit code. log: both streams. took_s: from start to exit."""

    code: int
    log: str
    took_s: float


def watch(command: list[str], env: dict[str, str], cwd: Path, timeout_s: float) -> Ended:
    """Run to the end. A process that is still there after `timeout_s` is killed and fails the test."""
    begun = time.monotonic()
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        try:
            log, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            log, _ = process.communicate()
            raise AssertionError(f"still running after {timeout_s} s:\n{log[-3000:]}") from None
    return Ended(process.returncode, log, time.monotonic() - begun)


def module(
    folder: Path, source: str, *args: str, timeout_s: float = 60, python: Path | None = None, **env: str
) -> Ended:
    """Run `source` as `python -m sd_scripts_patches -m probe ARGS`, in the checkout's folder where there is one.

    In sd-scripts' environment where it is here, else in ours.
    """
    (folder / "probe.py").write_text(source, encoding="utf-8")
    runner = python or (tiny.python() if tiny.python().is_file() else Path(sys.executable))
    base = tiny.environment(folder, **env)
    base["PYTHONPATH"] = (
        f"{folder}:{base['PYTHONPATH']}" if sys.platform != "win32" else f"{folder};{base['PYTHONPATH']}"
    )
    cwd = tiny.checkout() if (tiny.checkout() / "train_network.py").is_file() else folder
    return watch([str(runner), "-m", "sd_scripts_patches", "-m", "probe", *args], base, cwd, timeout_s)


def train(work: Path, args: list[str], timeout_s: float = 90, patched: bool = True, **env: str) -> Ended:
    """Run flux_train_network.py on the tiny models."""
    return watch(tiny.command(*args, patched=patched), tiny.environment(work, **env), tiny.checkout(), timeout_s)
