"""The undisturbed run that every disturbed one must equal, bit for bit.

Decision: it is made by the very command that a person would run (`bash train.sh`), with no monitor, no injector and no
pace, once for each seed and length, and kept in the cache by a hash of all that its bytes depend on: the sources of the
trainer and the guards, torch's version, the spec. Its data set's caches and its model are kept too, so that a disturbed run
starts in five seconds instead of eight; rows that test the caching begin without them.
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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

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
# Nothing that is known to change a bit of the LoRA; what a row changes here needs no reference of its own.
BITLESS = ("workers", "save_every_n_steps", "keep_states", "prompts", "sample_every_n_steps", "sample_steps")


@dataclass(frozen=True)
class Reference:
    """`data` is the data root of the undisturbed run; `sha256` that of its LoRA."""

    data: Path
    sha256: str
    steps: int


def environment(data: Path, **more: str) -> dict[str, str]:
    """The environment of a process of the matrix: its own data root, the CPU, nothing inherited that steers us.

    OMP_WAIT_POLICY: threads that spin for each other make a tiny step fifty times slower on a machine that is shared.
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
def data_root(data: Path):
    """`runs` works in this data root for the time being; one at a time, because the whole process shares its environment."""
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
    """A few small pictures with captions, the same on every machine."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for i in range(PHOTOS):
        height, width = ((64, 64), (96, 64), (64, 96))[i % 3]
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"d1sc, number {i}\n", encoding="utf-8")
    return folder


def create(data: Path, seed: int, changed: dict) -> Path:
    """Make the run in data root `data`; its folder."""
    import runs

    with data_root(data), tempfile.TemporaryDirectory() as pictures:
        return runs.create(runs.make({**SPEC, "seed": seed, **changed}), photos(Path(pictures)))


def key(seed: int, changed: dict) -> str:
    """Changes with whatever the undisturbed LoRA's bytes may depend on."""
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
    """Its name and abilities: another one may round otherwise, and a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = [line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))]
    return " ".join(sorted(set(told)))


def reference(seed: int, changed: dict) -> Reference:
    """The undisturbed run of this seed, from the cache or made now. RuntimeError with its log when it fails."""
    from filelock import FileLock

    folder = cache.folder("faults")
    data = folder / key(seed, changed)
    with FileLock(folder / f"{data.name}.lock", timeout=2 * RUN_S):
        if not (data / "whole.json").exists():
            shutil.rmtree(data, ignore_errors=True)
            _make(data, seed, {k: v for k, v in changed.items() if k not in BITLESS})
            _tidy(folder)
        (data / "whole.json").touch()
    made = json.loads((data / "whole.json").read_text(encoding="utf-8"))
    return Reference(data, made["sha256"], made["steps"])


def _tidy(folder: Path) -> None:
    """Runs of older sources that nobody has asked for in a month are deleted."""
    for mark in folder.glob("*/whole.json"):
        if time.time() - mark.stat().st_mtime > KEPT_S:
            shutil.rmtree(mark.parent, ignore_errors=True)


def _make(data: Path, seed: int, changed: dict) -> None:
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
            code = f"none after {RUN_S:.0f} s"
        finally:  # whoever ends this, Ctrl-C included: launcher and trainer end too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    lora = run / f"{NAME}.safetensors"
    if code or not lora.exists():
        raise RuntimeError(f"the undisturbed run failed (exit code {code}):\n{said}")
    made = {"sha256": sha256(lora), "steps": {**SPEC, **changed}["max_train_steps"]}
    (data / "whole.json").write_text(json.dumps(made), encoding="utf-8")


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def furnish(data: Path, made: Reference, cached: bool) -> None:
    """Put the model, and with `cached` the data set's caches, of the reference into a new data root."""
    shutil.copytree(made.data / "models", data / "models")
    if cached:
        for source in made.data.glob(f"datasets/{NAME}/.*-cache"):
            shutil.copytree(source, data / "datasets" / NAME / source.name)
