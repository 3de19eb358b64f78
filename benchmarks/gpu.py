"""The built-in trainer, the monitor and kohya's trainers on a GPU; *no GPU* where there is none.

    python -m benchmarks gpu [--part NAME …] [--only NAME …] [--model FOLDER] [--seconds N] [--json]

Parts, each by itself:

    runs       the tiny model in bf16 and fp16 with each optimizer of the presets, each kind of stored weights, split
               and streamed; its LoRA loads in diffusers
    exact      killed three times under the monitor: with deterministic algorithms the same bytes, else the same losses
    size       FLUX.1-dev of full size with random weights, or --model: seconds a step and peak memory of each VRAM tier
               at 512 and 1024 px, in as much memory as the tier has, and of what a run can set instead
    hangs      killed, stopped, and kernels and copies that never end: found, killed, the memory back, restarted
    kohya      sd-scripts on tiny weights, guarded and plain: losses, time of a step
    snapshots  what copies of 100 MB and 500 MB from the GPU cost a step

--only: of each part, the measurements with these names. --seconds: no measurement begins later than that, and
`left_out` names those. Figures appear as they are measured, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import gpu_model, overhead, tiny_flux as tiny
from benchmarks.report import CannotMeasure, Report, say
from benchmarks.trial import Job, make_toy, read_end, read_lines, started
from presets.estimate import estimate
from runs.machine import read_driver
from runs.paths import ROOT
from trainer.cache import FOLDER as CACHE

LONGEST_S = 400.0
STEPS = {"runs": 12, "exact": 24, "size": 8, "hangs": 40, "kohya": 100}
WARM_UP = 3  # steps at full size whose time does not count
KILLS = (5, 11, 17)
TIERS = {"12G": 12, "16G": 16, "20G": 20}  # 10**9 bytes
STORED: dict[str, dict[str, str]] = {
    **{kind: {"quantize": kind} for kind in ("float8_scaled", "int8", "nf4")},
    "2 blocks streamed": {"blocks_to_stream": "2"},
}
WAYS: list[tuple[str, str, float, dict[str, Any]]] = [  # name, tier whose flags it has, its memory, what else is set
    *((tier, tier, limit, {}) for tier, limit in TIERS.items()),
    ("NF4 in 12 GB", "16G", 12, STORED["nf4"]),
    ("18 blocks streamed in 12 GB", "16G", 12, {"blocks_to_stream": "18"}),
    ("int8", "16G", 16, STORED["int8"]),
    ("float8_scaled", "16G", 16, STORED["float8_scaled"]),
    ("bf16", "16G", 0, {"fp8_base": False}),
]
HANGS = ("sigkill", "sigstop", "endless_kernel", "endless_synchronize", "stuck_copy")
NOISE = 0.01  # of the last loss, where algorithms are not deterministic
CARD = """
import json, torch
torch.cuda.is_available() or exit("torch sees none")
one = torch.cuda.get_device_properties(0)
print(json.dumps({"name": one.name, "gb": round(one.total_memory / 1e9, 1), "torch": torch.__version__}))
"""
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it, cuBLAS is not deterministic
LOADS = """
import sys, torch, diffusers
pipe = diffusers.FluxPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.bfloat16).to("cuda")
pipe.load_lora_weights(sys.argv[2])
pipe("toy", height=64, width=64, num_inference_steps=1)
"""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--model", type=Path, help="a FLUX.1 in diffusers' layout; default: one of random weights")
    parser.add_argument("--only", nargs="+", help="the measurements with these names")
    parser.add_argument("--folder", type=Path, help="for 60 GB of files; default: of the system")
    parser.add_argument("--seconds", type=float, default=3600)


def measure(arguments: argparse.Namespace) -> Report:
    """The parts that were asked for; `exceeded` names what failed. Raises: CannotMeasure without a GPU."""
    card = gpu()
    with tempfile.TemporaryDirectory(prefix="hangproof-gpu-", dir=arguments.folder) as folder:
        bench = Bench(Path(folder), time.monotonic() + arguments.seconds, arguments)
        for part in arguments.part:
            bench.part = part
            PARTS[part](bench)
    found = {"gpu": card, **bench.figures, "left_out": bench.left_out}
    return Report(found, bench.exceeded)


def gpu() -> dict[str, Any]:
    """The card. Raises: CannotMeasure where there is none."""
    try:
        return json.loads(program(CARD))
    except Failed as problem:
        raise CannotMeasure(f"no GPU: {str(problem).strip().splitlines()[-1]}") from problem


@dataclasses.dataclass
class Bench:
    """What is measured: the figures by part and name, the limits that are exceeded, and what there was no time for."""

    folder: Path
    until_s: float
    arguments: argparse.Namespace
    part: str = ""
    figures: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    exceeded: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)

    def one(self, name: str, figures: Callable[[], dict[str, Any]]) -> None:
        """Measure one thing; what fails is a limit that is exceeded, and {}."""
        if self.arguments.only and name not in self.arguments.only:
            return
        if time.monotonic() > self.until_s:
            self.left_out.append(f"{self.part}: {name}")
            return
        began_s = time.monotonic()
        try:
            found = figures()
        except Failed as problem:
            say(f"{self.part}, {name}: {problem}")
            self.exceeded.append(f"{self.part}, {name}: {str(problem).splitlines()[0]}")
            found = {}
        else:
            say(f"{self.part}, {name}, {time.monotonic() - began_s:.0f} s: {json.dumps(found)}")
        self.figures.setdefault(self.part, {})[name] = found

    def new(self) -> Path:
        """A new folder for a measurement."""
        return Path(tempfile.mkdtemp(dir=self.folder))


class Failed(Exception):
    """What was measured did not do what it must; the message begins with a line that says so."""


def must(condition: object, what: str, more: str = "") -> None:
    """Raises: Failed when the condition does not hold. more: what follows the first line of its message."""
    if not condition:
        raise Failed(f"{what}\n{more}")


def environment(folder: Path, data: Path, supervised: bool) -> dict[str, str]:
    """Of a training; one that no monitor starts is told where its metrics go."""
    return {
        "HANGPROOF_DATA": str(data),
        "HANGPROOF_INJECT": "benchmarks.gpu_probe:fire",
        "HANGPROOF_GPU_RECORD": str(data / "record.jsonl"),
        "HANGPROOF_LOCKS": str(data),
        "TRAINER_PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **({} if supervised else {"HANGPROOF_RUN": str(folder)}),
    }


def run(folder: Path, data: Path, supervised: bool = False, more: dict[str, str] | None = None) -> dict[str, Any]:
    """Train a run to its end, with or without the monitor. more: its variables. Raises: Failed, with its log's end."""
    command = ["bash", str(folder / "train.sh")]
    if supervised:
        command = [sys.executable, "-m", "monitor", "run", str(folder)]
    variables = environment(folder, data, supervised) | (more or {})
    began_s, code = time.monotonic(), None
    with (
        started(Job(command, data / "log", folder, variables, ROOT), {}) as process,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        code = process.wait(LONGEST_S)
    must(code == 0, f"ended with {code} after {time.monotonic() - began_s:.0f} s", read_end(data / "log", 6000))
    peaks: dict[str, float] = {}
    for line in read_lines(data / "record.jsonl"):
        peaks[line["phase"]] = max(peaks.get(line["phase"], 0), line["allocated"])
    steps = [line for line in read_lines(folder / "metrics.jsonl") if "step_s" in line]
    return {
        "seconds": round(time.monotonic() - began_s, 1),
        "step_s": round(statistics.median(line["step_s"] for line in steps[WARM_UP:]), 4),
        "losses": [round(line["loss"], 6) for line in steps],
        "peak_gb": {phase: round(value / 1e9, 2) for phase, value in peaks.items()},
    }


def runs(bench: Bench) -> None:
    """Runs of the tiny model: each tier in both precisions, and each kind of stored weights."""
    for precision in ("bf16", "fp16"):
        for tier in TIERS:
            bench.one(f"{tier}, {precision}", partial(tiny_run, bench.new(), tier=tier, mixed_precision=precision))
    for name, extra in STORED.items():
        bench.one(name, partial(tiny_run, bench.new(), tier="16G", mixed_precision="bf16", extra=extra))


def tiny_run(data: Path, **fields: Any) -> dict[str, Any]:
    """A run of the tiny model with a sample image, and its LoRA in diffusers."""
    folder = make_toy(data, STEPS["runs"], 0, prompts=["toy"], sample_every_n_steps=STEPS["runs"], **fields)
    found = run(folder, data)
    must(list((folder / "sample").glob("*.png")), "no sample image")
    program(LOADS, str(data / "models/tiny-flux"), str(folder / "toy.safetensors"))
    return {**found, "losses": found["losses"][-1:]}


def program(code: str, *arguments: str) -> str:
    """The last line that a Python program prints. Raises: Failed with the end of its errors."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    must(done.returncode == 0, f"a program ended with {done.returncode}", done.stderr[-4000:])
    return (done.stdout.splitlines() or [""])[-1]


def exact(bench: Bench) -> None:
    """A run that is killed and an undisturbed one: the same bytes when torch is deterministic, else close losses."""
    bench.one("deterministic", partial(killed_and_whole, bench, HANGPROOF_GPU_EXACT="1", **WORKSPACE))
    bench.one("as it is", partial(killed_and_whole, bench))


def killed_and_whole(bench: Bench, **more: str) -> dict[str, Any]:
    """The same run twice under the monitor, one of them killed after the steps KILLS. more: variables of both."""
    last, loras = [], []
    for kills in ((), KILLS):
        data = bench.new()
        folder = make_toy(data, STEPS["exact"], 4, mixed_precision="bf16", tier="20G")
        killed_after(folder / "train.sh", kills)
        last.append(run(folder, data, True, more)["losses"][-1])
        loras.append((folder / "toy.safetensors").read_bytes())
        restarts = [event for event in read_lines(folder / "events.jsonl") if event["kind"] == "restarted"]
        must(len(restarts) == len(kills), f"{len(restarts)} restarts instead of {len(kills)}")
    must(loras[0] == loras[1] or not more, f"the LoRA has other bytes; last losses {last}")
    must(abs(last[0] - last[1]) <= NOISE * last[0], f"the last losses are {last}")
    return {"same_bytes": loras[0] == loras[1], "last_losses": last}


def killed_after(script: Path, kills: tuple[int, ...]) -> None:
    """Edit a script: its attempt N is killed after the step kills[N - 1]."""
    fault = "export HANGPROOF_FAULT=sigkill HANGPROOF_FAULT_EVERY=1 HANGPROOF_FAULT_STEP"
    lines = "".join(f'[ "${{HANGPROOF_ATTEMPT:-1}}" = {n} ] && {fault}={at}\n' for n, at in enumerate(kills, 1))
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("set -eu\n", f"export HANGPROOF_FAULT=\n{lines}set -eu\n"), encoding="utf-8")


def size(bench: Bench) -> None:
    """The full model at 512 and 1,024 pixels with the memory of each card, beside what the estimate says."""
    model = bench.arguments.model or bench.folder / "flux"
    caches = bench.new()
    for pixels in (512, 1024):
        for name, tier, limit_gb, extra in WAYS:
            more = {"pretrained_model_name_or_path": str(model), "t5xxl_max_token_length": "512", **extra}
            fields = {
                "model": "flux-dev",
                "backend": "diffusers",
                "mixed_precision": "bf16",
                "tier": tier,
                "extra": more,
            }
            bench.one(f"{name}, {pixels} px", partial(full_size, bench.new(), caches, limit_gb, pixels, fields))


def full_size(data: Path, caches: Path, limit_gb: float, pixels: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A run of the full model in so much memory (0: all). Encoders and VAE work in the first run of a size alone."""
    model = Path(fields["extra"]["pretrained_model_name_or_path"])
    if not model.exists():
        gpu_model.make(model)
    folder = make_toy(data, STEPS["size"], 0, size=pixels, resolution=pixels, **fields)
    ours = next(data.glob("datasets/*")) / CACHE
    shutil.copytree(caches, ours, dirs_exist_ok=True)
    found = run(folder, data, more={"HANGPROOF_GPU_BYTES": str(int(limit_gb * 1e9))})
    shutil.copytree(ours, caches, dirs_exist_ok=True)
    expected = estimate({**fields, "resolution": pixels})["stages_gb"]
    return {**found, "losses": found["losses"][-1:], "estimate_gb": expected}


def hangs(bench: Bench) -> None:
    """Each fault of HANGS in a run under the monitor."""
    for fault in HANGS:
        bench.one(fault, partial(hang, bench.new(), fault))


def hang(data: Path, fault: str) -> dict[str, Any]:
    """Seconds from the fault to each event, and what the report says of the card."""
    folder, mark, before = make_toy(data, STEPS["hangs"], 5, mixed_precision="bf16"), data / "mark", free_gb()
    variables = {"FAULT": fault, "FAULT_STEP": "22", "FAULT_MARK": str(mark), "PACE_S": "0.1"}
    run(folder, data, True, {f"HANGPROOF_{name}": value for name, value in variables.items()})
    began, events = mark.stat().st_mtime, read_lines(folder / "events.jsonl")
    at = {event["kind"]: datetime.fromisoformat(event["t"]).timestamp() - began for event in reversed(events)}
    restarts = sum(event["kind"] == "restarted" for event in events)
    must(restarts == 1, f"{restarts} restarts instead of 1", read_end(data / "log"))
    report = next(folder.glob("incidents/*/report.md")).read_text(encoding="utf-8")
    return {
        **{kind: round(at[kind], 2) for kind in ("hang", "killed", "restarted", "progress") if kind in at},
        "gb_less_free_than_before": round(before - free_gb(), 2),
        "report": [line for line in report.splitlines() if "GPU" in line or line.startswith("# ")],
    }


def free_gb() -> float:
    """Free memory of the card, in GiB."""
    return float(str(read_driver()["vram_free_gb"]))


def kohya(bench: Bench) -> None:
    """kohya's tiny trainer with and without the patches."""
    bench.one("plain and patched", partial(plain_and_patched, bench.new() / "turns"))


def plain_and_patched(folder: Path) -> dict[str, Any]:
    """Seconds a step of both, and how far their losses are apart. Raises: Failed without kohya's trainer."""
    must(not tiny.why_not(), tiny.why_not())
    more = {"CUDA_VISIBLE_DEVICES": "0"}
    both = overhead.take_turns(tiny.workdir(), folder, STEPS["kohya"], False, more=more, mixed_precision="bf16")
    losses = [[value for *_, value in tiny.losses(folder / f"{name}.losses")] for name in ("plain", "patched")]
    furthest = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    found = overhead.compare(*([one[0] for one in side] for side in both))
    return {**found, "losses": len(losses[0]), "largest_relative_difference": furthest}


SNAPSHOT = """
import json, statistics, sys, tempfile, time
from pathlib import Path
import torch
from guards import checkpoint, snapshots
from guards.snapshot_files import File
megabytes, out = int(sys.argv[1]), {}
values = {f"part {n}": torch.randn(megabytes * 250_000 // 16, device="cuda") for n in range(16)}
side = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
count = 1
def step():
    for _ in range(count):
        side @ side
    for value in values.values():
        value.mul_(0.9999)
    return values["part 0"][0].item()
step(); began = time.monotonic(); step()
count = max(1, int(0.1 / (time.monotonic() - began)))
for name in ("without", "as chosen", "each step"):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ring = Path(folder) / "a" / "ring"
        ring.mkdir(parents=True)
        memory = snapshots.Snapshots(ring, "run", "spec") if name != "without" else None
        took, every = [], []
        for number in range(1, 121):
            began = time.monotonic()
            step()
            if memory is not None:
                if name == "each step":
                    memory.every = 1
                    memory._idle.wait()
                if memory.due():
                    memory.take(f"a-step{number:08d}-state", number, 0, [File("model.safetensors", "safetensors", values)])
                    every.append(number)
            took.append(time.monotonic() - began)
        took = sorted(took[20:])
        spread = {"p50_ms": statistics.median(took), "p99_ms": took[98], "mean_ms": statistics.mean(took)}
        out[name] = {key: round(1e3 * value, 2) for key, value in spread.items()} | {"taken": len(every)}
        if memory is not None:
            memory.wait()
            costs_ms = [round(1e3 * cost, 2) for cost in memory._costs]
            out[name] |= {"off": memory.off, "failed": memory._failed, "valid": len(checkpoint.guards(ring)), "costs_ms": costs_ms}
print(json.dumps(out))
"""


def snapshots(bench: Bench) -> None:
    """The milliseconds of a snapshot in memory, for LoRAs of two sizes."""
    for megabytes in (100, 500):
        bench.one(f"{megabytes} MB", lambda size=megabytes: json.loads(program(SNAPSHOT, str(size))))  # type: ignore[misc]


PARTS: dict[str, Callable[[Bench], None]] = {
    part.__name__: part for part in (runs, exact, size, hangs, kohya, snapshots)
}
