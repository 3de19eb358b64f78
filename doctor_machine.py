"""The facts about this machine that decide whether training works on it: for `./start.sh doctor` and the page's tab "Doctor".

Each check yields findings: a line with a verdict, and what to do where something is wrong. What can block for ever (a driver, an
import of torch) runs in a process of its own with a limit. Nothing is changed, and nothing is left behind.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guards import loader
from monitor.process.spawned import Subjob
from presets import disks
from runs.machine import this_machine
from runs.paths import data_root, datasets_dir, models_dir, outputs_dir

OK, NOTE, FAILED = "ok", "note", "failed"
LEAST_DISK_GB = 40  # the files of FLUX.1 take 34 GB
LEAST_SHM_BYTES = (
    1 << 30
)  # Docker gives a container 64 MB (docs.docker.com/reference/cli/docker/container/run, --shm-size)
VERSIONS_S = 90.0  # a first import of torch from a slow disk
# In the trainer's own interpreter, from nothing of ours; -I: no PYTHONPATH, no current folder
ASK_VERSIONS = """
import importlib.metadata as m, json, multiprocessing, platform
found = {"python": platform.python_version(), "start": multiprocessing.get_start_method()}
for name in ("accelerate", "diffusers", "transformers", "peft", "xformers", "bitsandbytes"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
try:
    import torch
    found |= {"torch": torch.__version__, "cuda_build": torch.version.cuda or "", "cuda": torch.cuda.is_available()}
    if found["cuda"]:
        found |= {"devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
                  "bf16": torch.cuda.is_bf16_supported()}
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(found))
"""
ASK_DRIVER = """
import json
found = {"driver": "", "cuda": "", "gpus": [], "error": ""}
try:
    import pynvml as n
    n.nvmlInit()
    text = lambda v: v.decode() if isinstance(v, bytes) else v
    version = n.nvmlSystemGetCudaDriverVersion_v2()
    found |= {"driver": text(n.nvmlSystemGetDriverVersion()), "cuda": f"{version // 1000}.{version % 1000 // 10}"}
    for i in range(n.nvmlDeviceGetCount()):
        h = n.nvmlDeviceGetHandleByIndex(i)
        memory = n.nvmlDeviceGetMemoryInfo(h)
        found["gpus"].append([text(n.nvmlDeviceGetName(h)), memory.total, memory.used])
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(found))
"""
PACKAGES = ("accelerate", "diffusers", "transformers", "peft", "xformers", "bitsandbytes")


@dataclass(frozen=True)
class Finding:
    """One line. status: OK, NOTE (a warning) or FAILED (a problem). action: what to do, "" when nothing is wrong."""

    name: str
    status: str
    text: str
    action: str = ""


def ask(command: Sequence[str | Path], limit_s: float) -> dict[str, Any] | str:
    """What a command prints as JSON in its last line, or why there is none."""
    job = Subjob([*map(str, command)], limit_s)
    job.wait(time.sleep)
    return job.answer() or job.error[:300] or "it printed no answer"


def python_versions(name: str, python: Path, kohya: bool = False) -> Iterator[Finding]:
    """Python, torch and CUDA of an environment, and how its workers start."""
    found = ask([python, "-I", "-c", ASK_VERSIONS], VERSIONS_S)
    if isinstance(found, str):
        yield Finding(f"{name} Python", FAILED, f"{python}: {found}", "Remove this environment and install it again.")
        return
    packages = ", ".join(f"{key} {found[key]}" for key in PACKAGES if key in found)
    yield Finding(f"{name} Python", OK, f"{found['python']}; {packages}")
    if "error" in found or "torch" not in found:
        again = "Install it again with ./start.sh." if kohya else "Run ./start.sh again."
        yield Finding(f"{name} PyTorch", FAILED, found.get("error", "PyTorch is not installed"), again)
        return
    built = f"built for CUDA {found['cuda_build']}" if found["cuda_build"] else "built for the processor only"
    text = f"{found['torch']}, {built}"
    if found["cuda"]:
        bf16 = "" if found.get("bf16") else ", without bf16"
        yield Finding(f"{name} PyTorch", OK, f"{text}; it sees {', '.join(found['devices'])}{bf16}")
    elif this_machine().vram_gb:
        fix = (
            "Install the CUDA build of this version (pytorch.org, Get started)."
            if not found["cuda_build"]
            else "Update the GPU driver, then restart the machine."
        )
        yield Finding(f"{name} PyTorch", FAILED, f"{text}; it cannot use the GPU", fix)
    else:
        yield Finding(f"{name} PyTorch", OK, f"{text}; no GPU is there to use")
    safe = found["start"] in ("spawn", "forkserver", "fork")
    hint = "; the guards start loader workers before CUDA is used" if found["start"] == "fork" else ""
    yield Finding(f"{name} workers", OK if safe else NOTE, f"loader workers start by “{found['start']}”{hint}")


def gpu() -> Iterator[Finding]:
    """The driver and the GPUs with their memory."""
    here = this_machine()
    if here.note:
        yield Finding("GPU", FAILED, here.note, "Fix the driver, then run this again.")
    elif here.vram_gb:
        yield Finding("GPU", OK, f"{here.gpu_name}, {here.vram_gb:g} GB")
    else:
        yield Finding("GPU", NOTE, "no NVIDIA GPU found: only the toy model can be trained on this machine")
    if not here.vram_gb:
        return
    found = ask([sys.executable, "-I", "-c", ASK_DRIVER], 20.0)
    if isinstance(found, str) or found["error"]:
        why = found if isinstance(found, str) else found["error"]
        yield Finding(
            "GPU driver", FAILED, why, "Restart the machine. If that does not help, install the driver again."
        )
        return
    yield Finding("GPU driver", OK, f"{found['driver']}, for CUDA up to {found['cuda']}")
    for index, (name, total, used) in enumerate(found["gpus"]):
        share = used / total if total else 0.0
        text = f"{name}: {used / 2**30:.1f} of {total / 2**30:.1f} GB in use"
        action = "Close other programs that use this GPU before you train." if share > 0.2 else ""
        yield Finding(f"GPU {index}", NOTE if share > 0.2 else OK, text, action)


def memory() -> Iterator[Finding]:
    """The machine's memory, and the shared memory that loader workers pass images through."""
    import psutil

    now = psutil.virtual_memory()
    low = now.available < 4e9
    text = f"{now.available / 1e9:.1f} of {now.total / 1e9:.1f} GB available"
    yield Finding("memory", NOTE if low else OK, text, "Close other programs before you train." if low else "")
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    usage = shutil.disk_usage(shm)
    text = f"/dev/shm has {usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free"
    if usage.free < LEAST_SHM_BYTES:
        fix = "Loader workers pass images through it. Start the container with --shm-size 2g, or use 0 data loader workers."
        yield Finding("shared memory", NOTE, f"{text}, which is little", fix)
    else:
        yield Finding("shared memory", OK, text)


def folders() -> Iterator[Finding]:
    """The disk of the data folders: free space, kind of file system; and the folder for temporary files."""
    here = this_machine()
    disk = f"{here.free_disk_gb:.0f} GB free in {data_root()}"
    if here.free_disk_gb < LEAST_DISK_GB:
        more = f"{disk}; large base models with their checkpoints need {LEAST_DISK_GB} GB and more"
        yield Finding("disk", NOTE, more, "Free some disk space, or set HANGPROOF_DATA to a folder on a larger disk.")
    else:
        yield Finding("disk", OK, disk)
    seen: dict[int, str] = {}
    for name, folder in (("runs", outputs_dir()), ("data sets", datasets_dir()), ("models", models_dir())):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        device = place.stat().st_dev
        if device in seen:
            continue
        seen[device] = name
        yield from file_system(name, place)
    try:
        moved = loader.move_sockets()
        yield Finding("TMPDIR", NOTE if moved else OK, moved or "short enough for the sockets of loader workers")
    except loader.TooLong as error:
        yield Finding("TMPDIR", FAILED, str(error), "Set TMPDIR to a shorter folder.")


def file_system(name: str, folder: Path) -> Iterator[Finding]:
    """The kind of file system that a folder is on."""
    kind, mount = disks.file_system(folder.resolve())
    if disks.NETWORK.fullmatch(kind):
        fix = "A network disk can stall for minutes. Keep images on a local one, and set save_dir to a local folder."
        where = f"{folder} is on a network file system ({kind}, at {mount})"
        yield Finding(f"file system of {name}", NOTE, where, fix)
    elif kind:
        yield Finding(f"file system of {name}", OK, f"{kind}, at {mount}")
