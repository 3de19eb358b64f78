"""Scenarios of the fault matrix on the real sd-scripts: tiny weights, the rendered script, the guarded launcher, the monitor.

The undisturbed run is the outcome of `bash train.sh`; a disturbed run must end with its steps, learning rates and file
names. (sd-scripts draws its noise from generators that no state keeps, so the bytes are not compared here.)
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
import threading
from pathlib import Path

import tiny_sd_scripts

from benchmarks import scenario as ref
from benchmarks import trial
from benchmarks.scenario import Row, Scenario

STEPS = 36
RUN_S = 600
SPEC = {**ref.SPEC, "model": "flux-dev", "backend": "sd-scripts", "tier": "20G", "max_train_steps": STEPS, "workers": 2}
FILES = {"flux1-dev": "flux", "clip_l": "clip_l", "t5xxl_fp16": "t5xxl", "ae": "ae"}


def environment(data: Path, **more: str) -> dict[str, str]:
    """The environment of a process of such a scenario."""
    tiny = tiny_sd_scripts.environment(tiny_sd_scripts.workdir(images=4))
    taken = {name: tiny[name] for name in ("PYTHONPATH", "SD_SCRIPTS_DIR")}
    return {**ref.environment(data), **taken, "SD_SCRIPTS_VENV": str(tiny_sd_scripts.python().parent.parent), **more}


def create(data: Path, changed: dict) -> Path:
    """A run of sd-scripts in data root `data`; its folder."""
    work = tiny_sd_scripts.workdir(images=4)
    extra = {"tokenizer_cache_dir": str(work / "tokenizers"), "t5xxl_max_token_length": 32, "optimizer_type": "AdamW"}
    (data / "models").mkdir(parents=True, exist_ok=True)
    for name, source in FILES.items():
        with contextlib.suppress(FileExistsError):  # of another run
            (data / "models" / f"{name}.safetensors").symlink_to(work / f"{source}.safetensors")
    return trial.create(data, **{**SPEC, "extra": extra, **changed})


def outcome(folder: Path) -> dict:
    """What is compared: the learning rate by step (the last of each), and the names of the files."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {p.name for p in folder.iterdir() if p.suffix == ".safetensors" or p.name.endswith("-state")}
    return {"lr": {line["step"]: line["lr"] for line in lines if line["kind"] == "step"}, "names": sorted(names)}


_comparing = threading.Lock()
_undisturbed: list[dict] = []


def undisturbed() -> dict:
    """The outcome of an undisturbed run; made once, also when several scenarios need it at the same time."""
    with _comparing, tempfile.TemporaryDirectory(prefix="sd-undisturbed-") as root:
        if not _undisturbed:
            data = Path(root)
            folder = create(data, {})
            env = environment(data, HANGPROOF_RUN=str(folder), HANGPROOF_HEARTBEAT=str(data / "heart"))
            command = ["bash", str(folder / "train.sh")]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=RUN_S, check=False)
            assert done.returncode == 0, f"the undisturbed run failed:\n{(done.stdout + done.stderr)[-4000:]}"
            _undisturbed.append(outcome(folder))
            assert sorted(_undisturbed[0]["lr"]) == list(range(1, STEPS + 1))
    return _undisturbed[0]


class SdScripts(Scenario):
    """A scenario whose trainer is sd-scripts."""

    @classmethod
    def undisturbed(cls, row: Row, seed: int) -> ref.Reference:
        return ref.Reference(Path(), "", STEPS)

    def new_run(self, data: Path) -> Path:
        return create(data, self.row.get("spec", {}))

    def prepare_environment(self) -> dict[str, str]:
        return {**super().prepare_environment(), **environment(self.data)}

    def compare(self) -> list[str]:
        """Steps, learning rates and names are those of the undisturbed run; the report has its parts."""
        want, found, wrong = undisturbed(), outcome(self.folder), []
        if found["lr"] != want["lr"]:
            other = [s for s in want["lr"] if found["lr"].get(s) != want["lr"][s]]
            wrong.append(f"learning rates differ from the undisturbed run's at steps {other}")
        if found["names"] != want["names"]:
            wrong.append(f"files: {found['names']}, undisturbed: {want['names']}")
        for incident, report in zip(self.incidents(), self.reports(), strict=True):
            for words in (f"step {incident['step']} of {STEPS}", "## Cost", "## Likely cause"):
                if words not in report:
                    wrong.append(f"report.md does not contain {words!r}:\n{report[:1500]}")
            back = incident["resumed_from"]
            if back and not re.search(rf"(checkpoint|snapshot in memory) of step {back}\b", report):
                wrong.append(f"report.md does not name the restart from step {back}:\n{report[:1500]}")
        return wrong
