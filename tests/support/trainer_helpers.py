"""Real runs of the embedded trainer for its tests: a small data set, its command line, faults inside it.

This module is also imported by the trainer process (HANGPROOF_INJECT=trainer_helpers:fault), so it stays light.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import kohya_nursery

ROOT = Path(__file__).resolve().parents[2]
SIZES = [(64, 64), (96, 64), (64, 96), (80, 64), (64, 64)]


def make_images(folder: Path, count: int = 5) -> Path:
    import numpy
    from PIL import Image

    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for i in range(count):
        width, height = SIZES[i % len(SIZES)]
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=numpy.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"a thing number {i}", encoding="utf-8")
    return folder


def make_config(file: Path, images: Path, repeats: int = 2, batch_size: int = 1) -> Path:
    import tomlkit

    dataset = {"resolution": 64, "batch_size": batch_size, "enable_bucket": True, "bucket_reso_steps": 16}
    subset = {"image_dir": images.as_posix(), "num_repeats": repeats, "caption_extension": ".txt"}
    datasets = [{**dataset, "min_bucket_reso": 32, "subsets": [subset]}]
    file.write_text(tomlkit.dumps({"datasets": datasets}), encoding="utf-8")
    return file


FLAGS = """
output_name=tiny network_dim=4 optimizer_type=adamw learning_rate=1e-3 timestep_sampling=shift seed=42
discrete_flow_shift=3.1582 model_prediction_type=raw guidance_scale=1.0 t5xxl_max_token_length=16
max_data_loader_n_workers=0 max_train_steps=3
"""


def flags(model: Path, config: Path, output: Path, **changed: object) -> list[str]:
    """The command line of a run in float32; a flag is changed by name, dropped with None, bare with True."""
    folders = {"pretrained_model_name_or_path": model, "dataset_config": config, "output_dir": output}
    settings: dict[str, object] = {**folders, "network_train_unet_only": True}
    settings |= {**dict(word.split("=") for word in FLAGS.split()), **changed}
    out = []
    for key, value in settings.items():
        if value is not None and value is not False:
            words = value if isinstance(value, list) else [] if value is True else [value]
            out += [f"--{key}", *map(str, words)]
    return out


def environment(**extra: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HANGPROOF_")}
    kept |= {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return kept | extra


def fork(argv: list[str], fault: str = "", **extra: str) -> subprocess.CompletedProcess:
    """`python -m trainer ARGV`, forked from a process with its imports done. fault: what strikes in it, see `fault`."""
    extra |= {"HANGPROOF_INJECT": "trainer_helpers:fault", "TEST_FAULT": fault} if fault else {}
    command = [sys.executable, "-m", "trainer", *argv]
    return kohya_nursery.run(command, environment(**extra), ROOT, 500, merged=False)


def train(work: dict, name: str, fault: str = "", config: Path | None = None, ring=None, env=None, **changed: object):
    """A run in a folder of its own, which saves states and has its metrics, and how it ended.

    ring: the folder of snapshots in memory; the run goes on from the newest one, as the monitor starts it.
    """
    from guards import checkpoint, snapshot_files

    folder = work["folder"] / name
    folder.mkdir(exist_ok=True)
    more = {"HANGPROOF_RUN": str(folder), "HANGPROOF_HEARTBEAT": str(work["folder"] / f"beats-{name}"), **(env or {})}
    if ring:
        more[snapshot_files.RING] = str(ring)
        if found := next(iter(checkpoint.guards(ring)), None):
            changed["resume"] = ring / snapshot_files.RESUMED / found.name
    argv = flags(work["model"], config or work["config"], folder, **{"save_state": True, **changed})
    return folder, fork(argv, fault, **more)


def good(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.rstrip().endswith("model saved.")
    return done


def trained(work: dict, name: str, **settings) -> Path:
    """The folder of a run that is complete, with the arguments of `train`."""
    folder, done = train(work, name, **settings)
    good(done)
    return folder


def images(folder: Path) -> dict[str, bytes]:
    """The sample images under `folder` without the time in their names; two of the same moment are an error."""
    found: dict[str, bytes] = {}
    for path in sorted((folder / "sample").iterdir()):
        name = re.sub(r"_\d{14}_", "_", path.name)
        assert name not in found, f"{path.name} was made twice"
        found[name] = path.read_bytes()
    return found


def metrics(run: Path, kind: str = "step") -> list[dict]:
    """The lines of one kind in the metrics of a run, in the order they were written."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def numbers(path: Path) -> bytes:
    """The numbers of a LoRA without its header, which also has the numbers of steps and epochs."""
    lora = path.read_bytes()
    return lora[8 + int.from_bytes(lora[:8], "little") :]


def fault(phase: str, step: int, heartbeat) -> None:
    """Called at each beat of the trainer. TEST_FAULT says what to do:

    `kill@STEP+SECONDS`  SIGKILL so long after that step; `save@STEP+N`: in the first save from that step on, at the Nth
    fsync from there; `sample@STEP`: SIGKILL in the first sample image from that step on; `fsize@BYTES`: no file may
    become larger; `stop@STEP`: ask for a stop, as the monitor does; `hasty@STEP`: the same in the first denoising step
    of a sample, and SIGKILL in the next; `validate@0`: the same in the validation before a process's first step.
    """
    what, _, when = os.environ.get("TEST_FAULT", "").partition("@")
    at, _, more = when.partition("+")
    now = (what, phase, heartbeat.record.done if phase == "sample" else 0)
    if what == "kill" and step > int(at) + 1:
        time.sleep(60)  # the timer is late, as on a loaded machine it may be: it ends this
    elif what == "fsize" and phase == "step":
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(at), int(at)))
    elif now == ("kill", "step", 0) and step == int(at):
        threading.Timer(float(more), os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif now == ("save", "save", 0) and step >= int(at):
        import slow_disk

        os.environ["TEST_DISK"], os.fsync = f"0 kill@{more}", slow_disk.fsync
    elif now in (("sample", "sample", 1), ("hasty", "sample", 2)) and step >= int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    elif now in (("stop", "step", 0), ("hasty", "sample", 1), ("validate", "validate", 0)) and step == int(at):
        from guards.heartbeat import REQUEST_STOP, set_request

        set_request(heartbeat.path, REQUEST_STOP)
