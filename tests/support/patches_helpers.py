"""Runs a small module, or sd-scripts itself, under the patches, and returns exit code and log."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import kohya_nursery
import tiny_sd_scripts as tiny

ROOT = Path(__file__).resolve().parents[2]


class RunResult(NamedTuple):
    code: int
    log: str  # both streams


def watch(command: list[str], env: dict[str, str], cwd: Path, timeout_s: float, code: int | None = None) -> RunResult:
    """Run a command of a trainer's interpreter, from its nursery. Fails after `timeout_s`, or with another code."""
    try:
        done = kohya_nursery.run(command, env, cwd, timeout_s)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"still running after {timeout_s} s:\n{late.output[-3000:]}") from None
    assert code in (None, done.returncode), done.stdout[-3000:]
    return RunResult(done.returncode, done.stdout)


@contextlib.contextmanager
def ahead(request, fixture: str, jobs, at_once: int = 2):
    """Start the jobs that the selected tests of this module need, `at_once` at a time. Yields name → Future.

    A test names its job by a parameter. A job mostly starts and waits: in parallel they take half the time.
    """
    here = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    names = dict.fromkeys(item.callspec.params[fixture] for item in here if fixture in item.callspec.params)
    pool = ThreadPoolExecutor(at_once)
    try:
        yield {name: pool.submit(jobs[name]) for name in names if name in jobs}
    finally:  # an aborted test run does not wait for jobs that have not started
        pool.shutdown(cancel_futures=True)


def module(folder: Path, source: str, *args: str, trainer: Any = tiny, **env: str) -> RunResult:
    """Run `source` as `python -m sd_scripts_patches -m probe ARGS`.

    trainer: the tiny module of the trainer in whose environment and checkout it runs; None: in ours and in `folder`.
    """
    (folder / "probe.py").write_text(source, encoding="utf-8")
    if trainer:
        trainer.write_site(folder)
    base = (trainer or tiny).environment(folder, **env)
    base["PYTHONPATH"] = os.pathsep.join([str(folder), base["PYTHONPATH"]])
    python, cwd = (str(trainer.python()), trainer.checkout()) if trainer else (sys.executable, folder)
    return watch([python, "-m", "sd_scripts_patches", "-m", "probe", *args], base, cwd, 240)


def flip(path: Path) -> None:
    """Change one byte in the middle of the largest member of an npz; the zip directory stays intact."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def launch(script: Path, *args: str, timeout_s: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script under the launcher in our own environment, as a user does: nothing is forked from a nursery."""
    return subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", str(script), *args], cwd=ROOT,
        env=tiny.environment(script.parent, **env), check=False, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


def apply(patch, module) -> None:
    """Apply the targets of a patch to a hand-made module, which has the name of the module in the targets."""
    from sd_scripts_patches.patch import wrap

    for target in patch.targets:
        if target.module == module.__name__ and target.make is not None and not target.beside:
            owner = target.name.split(".")[0]
            if hasattr(module, owner):
                wrap(module, target.name, target.make)
