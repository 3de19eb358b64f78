"""Runs of the three real trainers on tiny weights, made as a user makes one, and what an undisturbed one ends with.

Decision: the undisturbed run, which a disturbed one must equal, is made by the command that a user would run (`bash
train.sh`), with no monitor, no injector and no pace, once a process for each seed and length.
"""

import atexit
import contextlib
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import musubi_helpers
import resume_helpers
import tiny_musubi
import tiny_sd_scripts
import trainer_helpers

from benchmarks import trial
from runs.paths import ROOT

NAME = "fault"
RUN_S = 900.0
SPEC: dict[str, Any] = {**trial.SPEC, "name": NAME, "resolution": 64, "mixed_precision": "no"}
SPEC |= {"max_train_steps": 36, "save_every_n_steps": 10, "keep_states": 4}
SD_SCRIPTS_SPEC = {**SPEC, "model": "flux-dev", "backend": "sd-scripts", "tier": "20G", "workers": 2}
SD_SCRIPTS_FILES = {"flux1-dev": "flux", "clip_l": "clip_l", "t5xxl_fp16": "t5xxl", "ae": "ae"}
# Settings that do not change a bit of the LoRA: runs that differ in them have one undisturbed run.
BITLESS = ["save_dir", "workers", "save_every_n_steps", "keep_states"]
BITLESS += ["prompts", "sample_every_n_steps", "sample_steps"]


def environment(data: Path, **more: str) -> dict[str, str]:
    """The environment of a process: its own data root, the CPU, none of our variables inherited."""
    fixed = {"HANGPROOF_DATA": str(data), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return trial.clean_environment(**{**fixed, **more})


def create(data: Path, seed: int = 0, **fields: Any) -> Path:
    """A run of the built-in trainer in data root `data`; its folder."""
    return trial.create(data, **{**SPEC, "seed": seed, **fields})


def sd_scripts_environment(data: Path) -> dict[str, str]:
    tiny = tiny_sd_scripts.environment(tiny_sd_scripts.workdir(images=4))
    taken = {name: tiny[name] for name in ("PYTHONPATH", "SD_SCRIPTS_DIR")}
    return environment(data, **taken, SD_SCRIPTS_VENV=str(tiny_sd_scripts.python().parent.parent))


def sd_scripts(data: Path, seed: int = 0, **fields: Any) -> Path:
    tiny_sd_scripts.need()
    work = tiny_sd_scripts.workdir(images=4)
    extra = {"tokenizer_cache_dir": str(work / "tokenizers"), "t5xxl_max_token_length": 32, "optimizer_type": "AdamW"}
    (data / "models").mkdir(parents=True, exist_ok=True)
    for name, source in SD_SCRIPTS_FILES.items():
        with contextlib.suppress(FileExistsError):  # of another run
            (data / "models" / f"{name}.safetensors").symlink_to(work / f"{source}.safetensors")
    return trial.create(data, **{**SD_SCRIPTS_SPEC, "seed": seed, "extra": extra, **fields})


def musubi(data: Path, seed: int = 0, **fields: Any) -> Path:
    kept = {key: SPEC[key] for key in ("name", "max_train_steps", "save_every_n_steps", "keep_states")}
    with trial.data_root(data):
        return musubi_helpers.run_of(musubi_helpers.add_toy_z(data), **{**kept, "seed": seed, **fields})


@dataclass(frozen=True)
class Trainer:
    """lora: of the finished file, what must be the same; the metadata of kohya's trainers has times."""

    create: Callable[..., Path]
    environment: Callable[[Path], dict[str, str]]
    lora: Callable[[Path], Any] = resume_helpers.tensors

    def outcome(self, folder: Path) -> dict[str, Any]:
        """Of a finished run: loss and learning rate of each step, and the LoRA."""
        lines = [line for line in trial.read_lines(folder / "metrics.jsonl") if line["kind"] == "step"]
        steps = {line["step"]: (line["loss"], line["lr"]) for line in lines}
        return {"steps": dict(sorted(steps.items())), "lora": self.lora(folder / f"{folder.name}.safetensors")}


TRAINERS = {
    "built-in": Trainer(create, environment, trainer_helpers.sha),
    "sd-scripts": Trainer(sd_scripts, sd_scripts_environment),
    "musubi": Trainer(musubi, lambda data: tiny_musubi.environment(tiny_musubi.workdir(), HANGPROOF_DATA=str(data))),
}
_making = threading.Lock()


class Undisturbed(NamedTuple):
    data: Path  # the data root
    outcome: dict[str, Any]


def undisturbed(trainer: str, seed: int, **fields: Any) -> Undisturbed:
    """The undisturbed run of this seed, made when it is needed first. AssertionError with its log when it fails."""
    with _making:
        return _undisturbed(trainer, seed, tuple(sorted((k, v) for k, v in fields.items() if k not in BITLESS)))


@functools.cache
def _undisturbed(trainer: str, seed: int, fields: tuple[tuple[str, Any], ...]) -> Undisturbed:
    data = Path(tempfile.mkdtemp(prefix="undisturbed-"))
    atexit.register(shutil.rmtree, data, ignore_errors=True)
    found = TRAINERS[trainer]
    run = found.create(data, seed, **dict(fields))
    (data / "tmp").mkdir()
    variables = found.environment(data) | {"TMPDIR": str(data / "tmp"), "HANGPROOF_RUN": str(run)}
    variables["HANGPROOF_HEARTBEAT"] = str(data / "heart")
    code = None
    with trial.started(trial.Job(["bash", str(run / "train.sh")], data / "log", run, variables), {}) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(RUN_S)
    assert code == 0, f"the undisturbed run ended with {code}:\n{trial.read_end(data / 'log')}"
    return Undisturbed(data, found.outcome(run))
