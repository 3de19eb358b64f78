"""The undisturbed run that every disturbed one must equal, bit for bit.

Decision: it is made by the command that a user would run (`bash train.sh`), with no monitor, no injector and no pace, once
for each seed and length. The cache keeps it under a hash of everything that its bytes depend on: the sources of the trainer
and the guards, torch's version, the spec. The data set's caches and the model are kept too, so that a disturbed run starts
in five seconds instead of eight; rows that test the caching start without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import cache
from runs.paths import ROOT

NAME = "fault"
RUN_S = 900.0
KEPT_S = 30 * 86400.0
PHOTOS = 6
SPEC = {
    "name": NAME,
    "trigger": "d1sc",
    "model": "tiny-flux",
    "tier": "16G",
    "backend": "diffusers",
    "resolution": 64,
    "mixed_precision": "no",
    "repeats": 1,
    "max_train_steps": 36,
    "save_every_n_steps": 10,
    "save_every_n_epochs": 0,
    "keep_states": 4,
    "workers": 0,
}
# Settings that do not change a bit of the LoRA: a row that changes them needs no reference of its own.
BITLESS = (
    "save_dir",
    "workers",
    "save_every_n_steps",
    "keep_states",
    "prompts",
    "sample_every_n_steps",
    "sample_steps",
)


@dataclass(frozen=True)
class Reference:
    """`data` is the data root of the undisturbed run; `sha256` that of its LoRA."""

    data: Path
    sha256: str
    steps: int


def environment(data: Path, **more: str) -> dict[str, str]:
    """The environment of a process of the matrix: its own data root, the CPU, none of our variables inherited.

    OMP_WAIT_POLICY: threads that spin for each other make a tiny step fifty times slower on a shared machine.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TOY_", "TINY_", "PYTHONPATH"))}
    fixed = {
        "HANGPROOF_DATA": str(data),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {**kept, **fixed, "PYTHONPATH": str(ROOT), **more}


_environment = threading.RLock()


@contextlib.contextmanager
def data_root(data: Path) -> Iterator[None]:
    """`runs` uses this data root inside the block; one at a time, because the environment belongs to the process."""
    with _environment:
        before = os.environ.get("HANGPROOF_DATA")
        os.environ["HANGPROOF_DATA"] = str(data)
        try:
            yield
        finally:
            if before is None:
                del os.environ["HANGPROOF_DATA"]
            else:
                os.environ["HANGPROOF_DATA"] = before


def photos(folder: Path) -> Path:
    """Six small pictures with captions, the same on every machine."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for i in range(PHOTOS):
        height, width = ((64, 64), (96, 64), (64, 96))[i % 3]
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"d1sc, number {i}\n", encoding="utf-8")
    return folder


def create(data: Path, seed: int, changed: dict[str, Any]) -> Path:
    """Make the run in data root `data`; its folder."""
    import runs

    with data_root(data), tempfile.TemporaryDirectory() as pictures:
        return runs.create(runs.make({**SPEC, "seed": seed, **changed}), photos(Path(pictures)))


def key(seed: int, changed: dict[str, Any]) -> str:
    """A hash of everything that the undisturbed LoRA's bytes may depend on."""
    digest = hashlib.sha256()
    for package in ("trainer", "guards", "runs", "presets"):
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    bits = {k: v for k, v in changed.items() if k not in BITLESS}
    libraries = [f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "peft", "numpy")]
    about = [seed, PHOTOS, SPEC, bits, libraries, _processor(), Path(__file__).read_text(encoding="utf-8")]
    digest.update(json.dumps(about, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Its model and features: another processor may round differently, and several machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    found = [line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))]
    return " ".join(sorted(set(found)))


def reference(seed: int, changed: dict[str, Any]) -> Reference:
    """The undisturbed run of this seed, from the cache or made now. RuntimeError with its log when it fails."""
    from filelock import FileLock

    folder = cache.folder("faults")
    data = folder / key(seed, changed)
    with FileLock(folder / f"{data.name}.lock", timeout=2 * RUN_S):
        if not (data / "complete.json").exists():
            shutil.rmtree(data, ignore_errors=True)
            _make(data, seed, {k: v for k, v in changed.items() if k not in BITLESS})
            _tidy(folder)
        (data / "complete.json").touch()
    made = json.loads((data / "complete.json").read_text(encoding="utf-8"))
    return Reference(data, made["sha256"], made["steps"])


def _tidy(folder: Path) -> None:
    """Delete the runs of older sources that were not used for a month."""
    for mark in folder.glob("*/complete.json"):
        if time.time() - mark.stat().st_mtime > KEPT_S:
            shutil.rmtree(mark.parent, ignore_errors=True)


def _make(data: Path, seed: int, changed: dict[str, Any]) -> None:
    run = create(data, seed, changed)
    with tempfile.TemporaryDirectory(prefix="fault-") as scratch:
        log = Path(scratch) / "log"
        with open(log, "wb") as out:
            command = ["bash", str(run / "train.sh")]
            env = environment(data, TMPDIR=scratch)
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        try:
            code = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:  # Ctrl-C included: launcher and trainer end too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    lora = run / f"{NAME}.safetensors"
    if code or not lora.exists():
        raise RuntimeError(
            f"the undisturbed run failed (exit code {code}; -1: not over after {RUN_S:.0f} s):\n{output}"
        )
    made = {"sha256": sha256(lora), "steps": {**SPEC, **changed}["max_train_steps"]}
    (data / "complete.json").write_text(json.dumps(made), encoding="utf-8")


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def copy_caches(data: Path, made: Reference, cached: bool) -> None:
    """Copy the reference's model, and with `cached` its data set's caches, into a new data root."""
    shutil.copytree(made.data / "models", data / "models")
    if cached:
        for source in made.data.glob(f"datasets/{NAME}/.*-cache"):
            shutil.copytree(source, data / "datasets" / NAME / source.name)
